"""Reporter: where the core sends what it decides and how far it is; the core itself never prints."""

from __future__ import annotations

import logging

logger = logging.getLogger("kernelhub")


class Reporter:
    """Receives events. This one logs; a command line subclasses it to draw progress."""

    def note(self, message: str) -> None:
        """A decision worth knowing."""
        logger.info(message)

    def warn(self, message: str) -> None:
        """Something that the user should know about, although the work goes on."""
        logger.warning(message)

    def download_started(self, build: str, files: int, size: int) -> None:
        """A build of ``files`` files and ``size`` bytes is about to be fetched."""
        self.note(f"downloading kernel {build}: {files} files, {size} bytes")

    def download_advanced(self, build: str, size: int) -> None:
        """``size`` more bytes have arrived."""

    def file_advanced(self, build: str, path: str, size: int, total: int) -> None:
        """``size`` more of the ``total`` bytes of one file of the build have arrived; negative when it starts anew."""

    def step(self, what: str, done: int, total: int) -> None:
        """A long run has ``done`` of ``total`` steps behind it and begins ``what``."""

    def download_finished(self, build: str) -> None:
        """The build is in the store."""
        self.note(f"kernel {build} is in the store")
