"""Identity: who may sign the builds of a publisher: which workflow, run for whom, vouched for by which issuer.

A signature says who made it, and that is worth something only if the user said beforehand whom to expect. It comes from
the user's policy file, or from the short list of publishers that is built in, never from the repository.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kernelhub.errors import InvalidConfig

GITHUB_ISSUER = "https://token.actions.githubusercontent.com"

_GITHUB = "https://github.com/"
_LONGEST = 512
_PLAIN = re.compile(r"[\x21-\x7e]+", re.ASCII)
_ANYTHING = "[!-.0-?A-~]*"  # printable, without "/" and "@"
_LITERAL_PARTS = 5  # of https://host/org/repo/...: what stands before the first "*"


@dataclass(frozen=True)
class Identity:
    """The expected signer of a publisher.

    ``signers`` are the names that may stand in the certificate: a workflow with its branch or tag
    (``https://github.com/org/repo/.github/workflows/build.yaml@refs/heads/main``) or an e-mail address. ``*`` is any
    characters but ``/``, ``@`` and space, behind the repository only. ``source`` is the repository that the workflow
    ran for; as anybody may call another's workflow, it is the workflow's own repository when GitHub is the issuer and
    nothing else is said.
    """

    issuer: str
    signers: tuple[str, ...]
    source: str = ""

    @classmethod
    def checked(cls, issuer: object, signers: object, source: object, origin: str) -> Identity:
        """From the values of a policy file.

        Raises:
            InvalidConfig: missing, not text, or a pattern that anybody could match.
        """
        if not isinstance(signers, list) or not signers:
            raise InvalidConfig(signers, "key 'signers'", '["https://github.com/org/repo/..."]', origin)
        names = tuple(_checked_signer(name, origin) for name in signers)
        plain = "" if source is None else _checked_text(source, "source", origin)
        return cls(_checked_text(issuer, "issuer", origin), names, plain)

    def admits(self, name: str) -> bool:
        """Is that name in a certificate one of those expected?"""
        return any(_pattern(signer).fullmatch(name) for signer in self.signers)

    def source_of(self, name: str) -> str:
        """The repository that a workflow of that name must have run for; empty when nothing is expected."""
        if not self.source and self.issuer == GITHUB_ISSUER and name.startswith(_GITHUB):
            return "/".join(name.split("/")[:_LITERAL_PARTS])
        return self.source

    def __str__(self) -> str:
        return f"{' or '.join(self.signers)} (issuer {self.issuer})"


KNOWN_IDENTITIES = {
    "kernels-community": Identity(
        GITHUB_ISSUER,
        tuple(
            f"{_GITHUB}huggingface/kernels-community/.github/workflows/{name}.yaml@refs/heads/main"
            for name in ("build", "build-mac", "build-windows", "sign-old-builds")
        ),
    )
}
"""Publishers whose workflows are public knowledge; a policy file that names one of them replaces its entry."""


def _checked_text(value: object, key: str, origin: str) -> str:
    if not isinstance(value, str) or not _PLAIN.fullmatch(value) or len(value) > _LONGEST:
        raise InvalidConfig(value, f"key {key!r}", '"https://..."', origin)
    return value


def _checked_signer(value: object, origin: str) -> str:
    name = _checked_text(value, "signers", origin)
    parts = name.partition("*")[0].split("/")
    if "*" in name and (not name.startswith("https://") or len(parts) <= _LITERAL_PARTS or not all(parts[2:5])):
        expected = "'*' behind the repository only: https://github.com/org/repo/.github/workflows/*@refs/heads/main"
        raise InvalidConfig(name, "key 'signers': a pattern that others match too", expected, origin)
    return name


def _pattern(signer: str) -> re.Pattern[str]:
    return re.compile(_ANYTHING.join(map(re.escape, signer.split("*"))), re.ASCII)
