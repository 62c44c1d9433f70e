"""Integrations: kernelhub seen through the interfaces of other packages."""
