"""Every exception that kernelhub raises on purpose.

KernelHubError
├ InvalidRequest InvalidBackend InvalidVariant InvalidEnvironment                        (ValueError)
├ InvalidConfig InvalidMetadata InvalidPath InvalidBundle InvalidGolden                  (ValueError)
├ InvalidLockfile                                                                        (ValueError)
│ └ LockfileNotFound                                                              (FileNotFoundError)
├ ResolutionError
│ ├ RepositoryNotFound                                                         (LookupError, OSError)
│ │ └ FolderNotFound                                                              (FileNotFoundError)
│ ├ RevisionNotFound                                               (LookupError, ValueError, OSError)
│ ├ NotLocked                                                               (LookupError, ValueError)
│ ├ KernelDependencyError                                                  (ValueError, RuntimeError)
│ └ NoCompatibleVariant                                                           (FileNotFoundError)
├ FetchError
│ ├ HubUnavailable                                                                  (ConnectionError)
│ ├ HubRefused                                                                      (PermissionError)
│ ├ NotCached                                                         (FileNotFoundError, ValueError)
│ ├ IncompleteDownload PrefetchFailed RefreshFailed
│ ├ CacheError                                                                              (OSError)
│ │ └ CacheFullError
│ └ LockTimeout                                                                        (TimeoutError)
├ VerificationError
│ ├ DigestMismatch UnsignedKernel BadSignature OlderBuild ChangedKernel PinMismatch RanksDiffer
│ └ UntrustedPublisher                                                  (PermissionError, ValueError)
├ LoadError                                                                             (ImportError)
│ ├ ImportFailed IncompatibleLibrary
│ ├ SymbolNotFound                                                                       (ValueError)
│ └ MissingDependency                                                           (ModuleNotFoundError)
├ RankFailed
└ BindingError
  ├ UnknownLayer                                                                        (LookupError)
  ├ NoKernel                                                                             (ValueError)
  ├ ContractMismatch                                                                      (TypeError)
  ├ NumericsMismatch                                                                     (ValueError)
  ├ InputsNeeded                                                                         (ValueError)
  └ BrokenFusion                                                                       (RuntimeError)

Each class carries its facts as attributes and formats them in ``__str__``: what was looked for, what was found,
what to type next. Text that came from outside is shown through ``repr``, so it cannot forge terminal output.
A fallback is decided by class, never by a bare built-in; the built-in bases are there for existing ``except`` clauses,
with those of the package ``kernels`` among them.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from kernelhub.compatibility import Rejection
    from kernelhub.environment import Environment

_SHOWN_CHARACTERS = 120


def shown(value: object) -> str:
    """``repr`` of an untrusted value, cut to a length that a message can hold."""
    try:
        text = ascii(value)
    except ValueError:  # an int of more digits than Python converts
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence: ``", did you mean 'X'?"`` when a known name is close, else a full stop."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {matches[0]!r}?" if matches else "."


def _rebuild(cls: type[KernelHubError], args: tuple[Any, ...], facts: dict[str, Any]) -> KernelHubError:
    # The base with fields of its own (OSError) need not be the first one.
    error = OSError.__new__(cls, *args) if issubclass(cls, OSError) else cls.__new__(cls, *args)
    error.__dict__.update(facts)
    return error


class KernelHubError(Exception):
    """Base of all errors of kernelhub; catches everything that kernelhub raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by facts, so that errors cross process borders (launchers, pools) unchanged."""
        return _rebuild, (type(self), self.args, dict(self.__dict__))


@dataclass(eq=False)
class _Invalid(KernelHubError, ValueError):
    """A value that was refused: ``value`` as given, the ``problem``, and the ``expected`` form."""

    value: object
    problem: str
    expected: str = ""
    origin: str = ""

    noun = "value"

    def __str__(self) -> str:
        where = f" (from {self.origin})" if self.origin else ""
        problem = self.problem.removesuffix(".")
        expected = f"expected {self.expected}" if self.expected else ""
        separator = (" " if problem.endswith("?") else "; ") if expected else ""
        return f"invalid {self.noun} {shown(self.value)}{where}: {problem}{separator}{expected}"


class InvalidRequest(_Invalid):
    noun = "kernel request"


class InvalidBackend(_Invalid):
    noun = "backend"


class InvalidVariant(_Invalid):
    noun = "build variant"


class InvalidEnvironment(_Invalid):
    noun = "environment"


class InvalidConfig(_Invalid):
    noun = "kernel config"


class InvalidLockfile(_Invalid):
    noun = "lock file"


class LockfileNotFound(InvalidLockfile, FileNotFoundError):
    """There is no lock file at that path."""


class InvalidMetadata(_Invalid):
    noun = "kernel metadata"


class InvalidPath(_Invalid):
    noun = "file path in a kernel build"


class InvalidBundle(_Invalid):
    noun = "kernel bundle"


class InvalidGolden(_Invalid):
    noun = "golden file"


class ResolutionError(KernelHubError):
    """No build could be chosen for a request."""


@dataclass(eq=False)
class RepositoryNotFound(ResolutionError, LookupError, OSError):
    """The Hub has no such kernel repository, or it is private, gated or disabled (``reason``)."""

    repo_id: str
    endpoint: str
    reason: str = "no kernel repository of that name"

    def __str__(self) -> str:
        return (
            f"kernel repository {shown(self.repo_id)} not found at {self.endpoint}: {self.reason}. "
            "Check the spelling of org/name; a private or gated repository needs a token (`hf auth login`)."
        )


@dataclass(eq=False)
class FolderNotFound(RepositoryNotFound, FileNotFoundError):
    """A local folder does not exist, or holds no kernel build."""

    def __str__(self) -> str:
        return f"no kernel build in folder {shown(self.repo_id)}: {self.reason}."


@dataclass(eq=False)
class RevisionNotFound(ResolutionError, LookupError, ValueError, OSError):
    """The repository exists, but not that version, branch, tag or commit."""

    repo_id: str
    revision: str
    versions: Sequence[int] = ()
    branches: Sequence[str] = ()
    reason: str = ""

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        return f"kernel {shown(self.repo_id)} has no revision {shown(self.revision)}{reason}: {self._known()}"

    def _known(self) -> str:
        if self.versions:
            listed = ", ".join(f"v{version}" for version in self.versions)
            newest = self.versions[-1]
            return f"versions are {listed}. Ask for one of them, e.g. '{self.repo_id}@v{newest}'."
        branches = ", ".join(shown(name) for name in self.branches) or "none"
        return f"it has no versions (branches v1, v2, ...); branches are {branches}."


@dataclass(eq=False)
class NotLocked(ResolutionError, LookupError, ValueError):
    """A lock is in force and has no entry for this kernel."""

    request: str
    lockfile: str

    def __str__(self) -> str:
        return (
            f"{self.lockfile} has no entry for {shown(self.request)}. Run `kernelhub lock` to add it, "
            "or remove the lock file argument."
        )


@dataclass(eq=False)
class NoCompatibleVariant(ResolutionError, FileNotFoundError):
    """No build of this kernel fits the environment; ``rejections`` holds one reason per build."""

    repo_id: str
    revision: str
    environment: Environment
    rejections: Sequence[Rejection] = ()
    unknown: Sequence[str] = ()
    fitting_version: int | None = None

    def __str__(self) -> str:
        lines = [f"no build of kernel {self.repo_id}@{self.revision} fits this environment ({self.environment})"]
        lines += [f"  {line}" for line in self._reasons()]
        if self.unknown:
            lines.append(f"  ignored, not a build variant: {', '.join(shown(name) for name in self.unknown[:5])}")
        lines.append(self._next_step())
        return "\n".join(lines)

    def _reasons(self) -> list[str]:
        """One line per distinct reason, with the variants it rejects: 60 variants stay on one screen."""
        if not self.rejections:
            return ["the repository has no builds at this revision"]
        grouped: dict[str, list[str]] = {}
        for rejection in self.rejections:
            grouped.setdefault(rejection.reason, []).append(str(rejection.variant))
        return [f"{reason}: {_few(names)}" for reason, names in grouped.items()]

    def _next_step(self) -> str:
        if self.fitting_version is not None:
            version = f"v{self.fitting_version}"
            return f"Version {version} has a build that fits: ask for '{self.repo_id}@{version}'."
        return "No other version has a build that fits; ask the publisher for one, or change the environment."


def _few(names: Sequence[str], limit: int = 4) -> str:
    listed = ", ".join(names[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"


@dataclass(eq=False)
class KernelDependencyError(ResolutionError, ValueError, RuntimeError):
    """The kernels that a kernel depends on cannot be resolved: a cycle, too deep or too many; ``path`` leads there."""

    problem: str
    path: Sequence[str]

    def __str__(self) -> str:
        return f"kernel dependencies: {self.problem}: {' -> '.join(self.path)}"


class FetchError(KernelHubError):
    """The bytes of a build could not be brought into the store."""


@dataclass(eq=False)
class HubUnavailable(FetchError, ConnectionError):
    """A request to the Hub failed; ``cause`` is the root cause in one line."""

    url: str
    cause: str

    def __str__(self) -> str:
        return f"cannot reach the Hub at {self.url}: {self.cause}"


@dataclass(eq=False)
class HubRefused(FetchError, PermissionError):
    """The Hub was reached and says no (HTTP ``status``); another try, or an older answer, would not change that."""

    what: str
    url: str
    status: int
    reason: str

    def __str__(self) -> str:
        return f"the Hub at {self.url} refuses {self.what}: {self.reason} (HTTP {self.status})"


@dataclass(eq=False)
class NotCached(FetchError, FileNotFoundError, ValueError):
    """Offline, and the store does not hold what was asked for."""

    what: str
    store: Path
    command: str

    def __str__(self) -> str:
        return f"offline, and {self.what} is not in {self.store}. With network access, run: {self.command}"

    @classmethod
    def all_of(cls, missing: Iterable[NotCached]) -> NotCached:
        """One error for everything that is missing, with one command that fetches it all; at least one is given."""
        distinct = list({(error.what, error.command): error for error in missing}.values())
        if len(distinct) == 1:
            return distinct[0]
        requests: dict[tuple[str, str], list[str]] = {}
        for error in distinct:
            head, quoted, rest = error.command.partition("'")
            request, _, options = rest.partition("'")
            requests.setdefault((head, options), []).append(f"{quoted}{request}{quoted}")
        commands = [f"{head}{' '.join(dict.fromkeys(names))}{rest}" for (head, rest), names in requests.items()]
        what = " and ".join(dict.fromkeys(error.what for error in distinct))
        return cls(what, distinct[0].store, " && ".join(commands))


@dataclass(eq=False)
class IncompleteDownload(FetchError):
    """A body ended early, was too long, or differed from what the Hub had announced."""

    repo_id: str
    path: str
    problem: str

    def __str__(self) -> str:
        return f"download of {shown(self.path)} from {self.repo_id} failed: {self.problem}. Nothing was kept."


@dataclass(eq=False)
class PrefetchFailed(FetchError):
    """Some of the kernels asked for could not be brought into the store; the others were."""

    failures: Sequence[tuple[str, str]]
    asked: int

    def __str__(self) -> str:
        lines = [f"{len(self.failures)} of {self.asked} could not be brought into the store"]
        return "\n  ".join([*lines, *(f"{name}: {problem}" for name, problem in self.failures)])


@dataclass(eq=False)
class RefreshFailed(FetchError):
    """No newer trust root could be had; the one in use stays."""

    url: str
    cause: str

    def __str__(self) -> str:
        return f"the trust root could not be refreshed from {self.url}: {self.cause}. The one in use was not changed."


@dataclass(eq=False)
class CacheError(FetchError, OSError):
    """The store's folder cannot be used."""

    path: Path
    problem: str

    def __str__(self) -> str:
        return f"kernel store {self.path}: {self.problem}. Set KERNELHUB_CACHE to another folder to move it."


@dataclass(eq=False)
class CacheFullError(CacheError):
    """Not enough free space; told before the first byte is downloaded. Sizes are in bytes."""

    needed: int = 0
    free: int = 0

    def __str__(self) -> str:
        return (
            f"kernel store {self.path}: {self.problem}, {self.needed} bytes needed, {self.free} bytes free. "
            "Free some space (`kernelhub cache prune`), or set KERNELHUB_CACHE to another folder."
        )


@dataclass(eq=False)
class LockTimeout(FetchError, TimeoutError):
    """Another process held the lock of this build for longer than ``waited`` seconds."""

    path: Path
    waited: float
    holder: str = "unknown"

    def __str__(self) -> str:
        return f"waited {self.waited:.0f} s for the lock {self.path} (held by {self.holder})"


class VerificationError(KernelHubError):
    """A build is not what it should be. Never a reason to fall back silently."""


@dataclass(eq=False)
class DigestMismatch(VerificationError):
    """The files of a build are not those that its manifest or metadata lists; nothing was imported."""

    build: str
    path: str
    problem: str

    def __str__(self) -> str:
        return f"kernel build {self.build}: file {shown(self.path)} {self.problem}. Nothing was imported."


@dataclass(eq=False)
class UnsignedKernel(VerificationError):
    """Policy asks for more than this build can prove (a digest, a signature); ``reason`` says what it lacks."""

    build: str
    state: str
    required: str
    reason: str = ""

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"kernel build {self.build} is {self.state}, but {self.required} is required{reason}"


@dataclass(eq=False)
class BadSignature(VerificationError):
    """A build carries a signature that does not hold, or that is for another build; nothing was imported."""

    build: str
    problem: str

    def __str__(self) -> str:
        return f"kernel build {self.build}: its signature is refused: {self.problem}. Nothing was imported."


@dataclass(eq=False)
class OlderBuild(VerificationError):
    """A signed build is older than one that this machine has seen under the same name; nothing was imported."""

    build: str
    repo_id: str
    found: str
    seen: str

    def __str__(self) -> str:
        return (
            f"kernel build {self.build} is older than what {shown(self.repo_id)} gave before: {self.found}, but "
            f"{self.seen} was seen. A mirror may be serving old builds. Nothing was imported. If you want this one, "
            f"ask for its commit, or allow it: KERNELHUB_ALLOW_OLDER=1, or `allow = [{self.repo_id!r}]` under [older] "
            "in the policy file."
        )


@dataclass(eq=False)
class ChangedKernel(VerificationError):
    """(Strict mode) a version or branch gives another commit, or other files, than at its first use on this machine."""

    build: str
    name: str
    first: str
    now: str

    @property
    def change(self) -> str:
        """What changed, in one sentence."""
        if self.first == self.now:
            return f"kernel {self.name} has other files at commit {self.now[:12]} than at its first use here"
        return f"kernel {self.name} moved: commit {self.first[:12]} at its first use here, {self.now[:12]} now"

    def __str__(self) -> str:
        repo_id = self.name.partition("@")[0]
        return (
            f"{self.change}. Nothing of build {self.build} was imported. If you want this one, lock it (kernelhub lock "
            f"{self.name!r}) or ask for its commit: {f'{repo_id}@{self.now}'!r}."
        )


@dataclass(eq=False)
class UntrustedPublisher(VerificationError, PermissionError, ValueError):
    """The publisher is not a trusted one and the caller did not opt in for this repository.

    ``advice`` is what to do instead of opting in, where that would be the wrong answer.
    """

    repo_id: str
    publisher: str
    reason: str
    suggestion: str = ""
    advice: str = ""

    def __str__(self) -> str:
        advice = self.advice or f"If you trust it, pass trust_remote_code=[{self.repo_id!r}]."
        return (
            f"kernel {shown(self.repo_id)} would run code of publisher {shown(self.publisher)}, {self.reason}"
            f"{self.suggestion} Loading a kernel runs its author's code in this process. {advice}"
        )


@dataclass(eq=False)
class PinMismatch(VerificationError):
    """The user's policy pins this repository to another commit."""

    repo_id: str
    commit: str
    pin: str
    origin: str

    def __str__(self) -> str:
        return (
            f"kernel {shown(self.repo_id)} would be loaded at commit {self.commit}, "
            f"but {self.origin} pins it to {self.pin}. Ask for '{self.repo_id}@{self.pin}', or change the pin."
        )


@dataclass(eq=False)
class RanksDiffer(VerificationError):
    """Ranks of one job hold different code for one kernel; ``digests`` maps each rank to what it holds of it."""

    build: str
    digests: Mapping[int, str]

    @property
    def first(self) -> int:
        """The rank that the others are compared with."""
        return min(self.digests)

    @property
    def differing(self) -> list[int]:
        """The ranks that hold something else than the first one."""
        return [rank for rank, digest in self.digests.items() if digest != self.digests[self.first]]

    def __str__(self) -> str:
        held = ", ".join(f"rank {rank} {self.digests[rank][:12]}" for rank in (self.first, *self.differing[:8]))
        return (
            f"kernel build {self.build} is not the same on all ranks: {_few_ranks(self.differing)} "
            f"{'differs' if len(self.differing) == 1 else 'differ'} from rank {self.first} "
            f"(sha256: {held}). Nothing was imported. Remove that build from the store of these ranks and try again."
        )


@dataclass(eq=False)
class RankFailed(KernelHubError):
    """A step that all ranks take together failed on some of them; ``failures`` maps each of these to its error."""

    step: str
    failures: Mapping[int, str]

    def __str__(self) -> str:
        lines = [f"{self.step} failed on {_few_ranks(list(self.failures))}, so no rank goes on"]
        return "\n  ".join([*lines, *(f"rank {rank}: {problem}" for rank, problem in list(self.failures.items())[:8])])


def _few_ranks(ranks: Sequence[int]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {_few([str(rank) for rank in ranks], 16)}"


class LoadError(KernelHubError, ImportError):
    """A verified build could not be imported."""


@dataclass(eq=False)
class ImportFailed(LoadError):
    """Importing the build raised; the original exception is chained."""

    build: str
    cause: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f" {self.hint}" if self.hint else ""
        return f"importing kernel {self.build} failed: {self.cause}.{hint}"


@dataclass(eq=False)
class SymbolNotFound(LoadError, ValueError):
    """The kernel does not define that symbol; ``exported`` lists what it does define."""

    build: str
    symbol: str
    exported: Sequence[str]
    reason: str = "is not defined by the kernel"

    def __str__(self) -> str:
        exported = ", ".join(self.exported) or "nothing"
        hint = did_you_mean(self.symbol, self.exported)
        return f"symbol {shown(self.symbol)} {self.reason} {self.build}{hint} It exports: {exported}."


@dataclass(eq=False)
class IncompatibleLibrary(LoadError):
    """A native library of the build cannot be loaded here."""

    build: str
    library: str
    cause: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f" {self.hint}" if self.hint else ""
        return f"kernel {self.build}: native library {shown(self.library)} cannot be loaded: {self.cause}.{hint}"


@dataclass(eq=False)
class MissingDependency(LoadError, ModuleNotFoundError):
    """The kernel needs a Python package that is not installed; kernelhub never installs it."""

    build: str
    dependency: str
    module: str
    package: str

    def __str__(self) -> str:
        return (
            f"kernel {self.build} needs {shown(self.dependency)} (import {self.module}), which is not installed: "
            f"run `pip install {self.package}`."
        )


class BindingError(KernelHubError):
    """A kernel could not be bound to the layers it was asked for."""


@dataclass(eq=False)
class UnknownLayer(BindingError, LookupError):
    """The config names a layer that the model does not have."""

    layer: str
    known: Sequence[str]

    def __str__(self) -> str:
        known = ", ".join(self.known) or "none"
        return (
            f"no layer of this model answers to {shown(self.layer)}{did_you_mean(self.layer, self.known)} "
            f"Layer names in this model: {known}. Pass strict=False to bind what fits."
        )


@dataclass(eq=False)
class NoKernel(BindingError, ValueError):
    """No kernel is mapped to a layer for this device and mode, and none of those cases may fall back."""

    layer: str
    problem: str

    def __str__(self) -> str:
        return f"no kernel for layer {shown(self.layer)}: {self.problem}"


@dataclass(eq=False)
class ContractMismatch(BindingError, TypeError):
    """The kernel layer does not fit the layer it should replace."""

    module_path: str
    layer: str
    kernel: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kernel} cannot replace the forward of {self.module_path} ({self.layer}): {self.reason}"


@dataclass(eq=False)
class BrokenFusion(BindingError, RuntimeError):
    """One kernel replaces several layers, and the model does not use them one after the other."""

    layers: str
    problem: str

    def __str__(self) -> str:
        return f"{self.layers} run as one kernel, but {self.problem}; leave this fusion out of the config"


@dataclass(eq=False)
class NumericsMismatch(BindingError, ValueError):
    """The kernel computes other numbers than the layer it replaces, or leaves other traces; ``problem`` has figures."""

    module_path: str
    kernel: str
    problem: str

    def __str__(self) -> str:
        return f"{self.kernel} computes other numbers than {self.module_path}: {self.problem}"


@dataclass(eq=False)
class InputsNeeded(BindingError, ValueError):
    """A model has to run once, and nothing tells what its inputs look like."""

    model: str

    def __str__(self) -> str:
        return (
            f"cannot make up inputs for a {self.model}: only a language model whose config tells its vocabulary "
            "allows that. Pass inputs=..., what the model is called with: a dict of keywords, a tuple, or one tensor."
        )
