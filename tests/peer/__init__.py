"""What the tests that compare kernelhub with the package ``kernels`` share; its scripts run on both interpreters."""
