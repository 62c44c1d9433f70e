"""Release: the version of the package ``kernels`` whose names these are."""

API_VERSION = "0.17.2"
