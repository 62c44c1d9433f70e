"""What Trainer of transformers takes from the package `liger-kernel`, served by kernelhub.

It is found as ``liger_kernel`` while ``kernelhub.integrations.transformers`` is on and no such package is installed.
"""

from kernelhub.integrations.transformers.release import LIGER_API

__version__ = LIGER_API

__all__ = ["__version__"]
