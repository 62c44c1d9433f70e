"""Bundle: builds with all that they need, in one file, for machines without network.

A bundle is an archive (``archive.py``) of these members, in this order::

    bundle.json        which builds (repository, commit, variant, path, size and sha256 of each file), and what the
                       versions and branches of their repositories mean
    kernelhub.lock     a lock of the same kernels; absent where one lock cannot hold them all
    files/<sha256>     each file once, whichever builds it belongs to

The sha256 of ``bundle.json`` covers everything and is the bundle's digest. Who made a bundle is not in it, so it never
grants trust: the Hub's mark on a publisher does not count for bytes that do not come from the Hub. Each repository has
to be named by whoever installs it, or be in the user's policy file.
"""

from kernelhub.bundle.contents import CONTENTS, SUFFIX, Bundle, BundledBuild
from kernelhub.bundle.creation import create
from kernelhub.bundle.installation import Installed, install
from kernelhub.bundle.reader import inspect

__all__ = ["CONTENTS", "SUFFIX", "Bundle", "BundledBuild", "Installed", "create", "inspect", "install"]
