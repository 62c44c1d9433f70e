"""One rank of a job: runs every scenario in turn and writes what it saw as JSON; started by test_distributed.py."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rank_process
import torch
import torch.distributed as dist
from kernel_repository import write_build
from torch import nn

from kernelhub import load_kernel, report
from kernelhub.errors import KernelHubError
from kernelhub.integrations.distributed import kernelize_together, load_together, resolve_together
from kernelhub.policy import NO_POLICY
from kernelhub.session import Session
from kernelhub.store import Manifest, StoredFile
from kernelhub.verify import hash_file

if TYPE_CHECKING:
    from collections.abc import Callable

REPO = "org/norm@v1"
CONFIG = {"RMSNorm": f"{REPO}:Norm", "Gate": "org/gate@v1:Gate"}


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Job:
    """The scenarios, as methods; each gets a fresh store for this rank."""

    def __init__(self, folder: Path, endpoint: str, rank: int) -> None:
        self.folder = folder
        self.endpoint = endpoint
        self.rank = rank
        self.name = ""

    def session(self, store: str = "", **options: Any) -> Session:
        """By default every rank is a machine of its own."""
        place = self.folder / "stores" / self.name / (store or f"rank-{self.rank}")
        return Session(cache_dir=place, endpoint=self.endpoint, token=False, **options)

    def same_code(self) -> Any:
        return load_together(REPO, session=self.session()).WHO

    def symbol(self) -> Any:
        return load_together(f"{REPO}:Norm", session=self.session()).__name__

    def shared_store(self) -> Any:
        session = self.session("one")
        load_together("org/once@v1", session=session)
        return len(list(session.store.builds()))

    def moving_branch(self) -> Any:
        """The branch moves after rank 0 has asked and before anybody downloads."""
        session = self.session()
        [pin] = resolve_together(["org/moving@v1"], session)
        dist.barrier()
        if self.rank == 0:
            root = self.folder / "repositories"
            write_build(root, "org/moving", "v1", "torch-cpu", {"__init__.py": "STATE = 'moved'\n"})
        dist.barrier()
        session.obtain(pin)
        alone = self.session("alone").resolve(pin.request)
        return [pin.commit, alone.commit]

    def branch_moves_between_stores(self) -> Any:
        """Each rank's store remembers another state of the branch; rank 0's is what counts."""
        request = "org/drifting@v1"
        root = self.folder / "repositories"
        for turn in range(dist.get_world_size()):
            if turn == self.rank:
                write_build(root, "org/drifting", "v1", "torch-cpu", {"__init__.py": f"STATE = {turn}\n"})
                remembered = load_kernel(request, session=self.session()).STATE
            dist.barrier()
        return [remembered, load_together(request, session=self.session()).STATE]

    def tampered_store(self) -> Any:
        """The last rank's store holds other code, with a manifest and receipt that fit it."""
        session = self.session()
        load_together(REPO, session=session)
        if self.rank == dist.get_world_size() - 1:
            tamper(session)
        return load_together(REPO, session=self.session())

    def tampered_store_on_binding(self) -> Any:
        session = self.session()
        load_together(REPO, session=session)
        if self.rank == dist.get_world_size() - 1:
            tamper(session)
        model = nn.Sequential(nn.RMSNorm(4))
        try:
            kernelize_together(model, {"RMSNorm": CONFIG["RMSNorm"]}, session=self.session())
        finally:
            assert "forward" not in vars(model[0])

    def unknown_kernel(self) -> Any:
        return load_together("org/nothing", session=self.session())

    def untrusted_kernel(self) -> Any:
        return load_together("stranger/kernel", session=self.session())

    def trusted_by_the_caller(self) -> Any:
        return load_together("stranger/kernel", session=self.session(), trust_remote_code=["stranger/kernel"]).WHO

    def one_rank_without_network(self) -> Any:
        """The last rank cannot download: nobody goes on, and nobody waits for ever."""
        last = self.rank == dist.get_world_size() - 1
        return load_together(REPO, session=self.session(offline=True if last else None))

    def one_rank_fails_to_import(self) -> Any:
        return load_together("org/picky@v1", session=self.session())

    def binding(self) -> Any:
        """Stages of a pipeline: every rank has a norm, the last one also a gate."""
        layers = [nn.RMSNorm(4)] + ([Gate()] if self.rank == dist.get_world_size() - 1 else [])
        model = nn.Sequential(*layers)
        kernelize_together(model, CONFIG, strict=False, session=self.session())
        return [bool((model(torch.ones(1, 4)) == 7).all()), ["forward" in vars(layer) for layer in model]]

    def binding_nothing(self) -> Any:
        model = nn.Sequential(nn.RMSNorm(4))
        kernelize_together(model, {"RMSNorm": "org/norm@v1:Nothing"}, session=self.session())

    def one_rank_fails_to_bind(self) -> Any:
        """Where it would have worked nothing is left behind either, and what was bound before still is."""
        model, bound = nn.Sequential(nn.RMSNorm(4)), nn.Sequential(nn.RMSNorm(4))
        kernelize_together(bound, {"RMSNorm": CONFIG["RMSNorm"]}, session=self.session())
        with contextlib.suppress(KernelHubError):
            kernelize_together(bound, {"RMSNorm": "org/picky@v1:Norm"}, session=self.session())
        assert [row.kernel.partition("@")[0] for row in report(bound) if row.state == "bound"] == ["org/norm"]
        assert (bound(torch.ones(1, 4)) == 7).all()
        try:
            kernelize_together(model, {"RMSNorm": "org/picky@v1:Norm"}, session=self.session())
        finally:
            assert "forward" not in vars(model[0])

    def in_a_group(self) -> Any:
        """A group of all ranks but rank 0: its own first rank decides."""
        members = list(range(1, dist.get_world_size()))
        group = dist.new_group(members)
        if self.rank == 0:
            return None
        return load_together(REPO, session=self.session(), group=group).WHO

    def shipped_collection(self) -> Any:
        [pin] = resolve_together(["builtin"], self.session())
        return [pin.name, pin.folder is not None]

    def pinned_by_a_policy(self) -> Any:
        """The last rank's user has pinned the repository to another commit."""
        session = self.session()
        if self.rank == dist.get_world_size() - 1:
            (self.folder / "policy.toml").write_text(f'[pins]\n"org/norm" = "{"d" * 40}"\n')
            session = self.session(policy_file=self.folder / "policy.toml")
        assert session.policy.pins or session.policy == NO_POLICY
        return load_together(REPO, session=session)


def tamper(session: Session) -> None:
    [build] = session.store.builds()
    path = build.files_folder / "__init__.py"
    metadata = build.files_folder / "metadata.json"
    for file in (path, metadata):
        file.chmod(0o644)
    path.write_text("WHO = 'evil'\n")
    listed = [file.path for file in build.manifest.files]
    files = tuple(
        StoredFile(name, (build.files_folder / name).stat().st_size, hash_file(build.files_folder / name))
        for name in listed
    )
    old = build.manifest
    manifest = Manifest(old.repo_id, old.commit, old.variant, old.endpoint, files)
    (build.folder / "manifest.json").chmod(0o644)
    (build.folder / "manifest.json").write_text(json.dumps(manifest.to_dict()))
    (build.folder / "receipt.json").unlink(missing_ok=True)


def run(scenario: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": scenario()}
    except KernelHubError as error:
        return {"error": type(error).__name__, "text": str(error)}


def main() -> None:
    folder, endpoint, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
    dist.init_process_group("gloo")
    job = Job(folder, endpoint, dist.get_rank())
    seen = {}
    for job.name in names:
        seen[job.name] = run(getattr(job, job.name))
        dist.barrier()
    (folder / f"seen-{job.rank}.json").write_text(json.dumps(seen))
    rank_process.leave()


if __name__ == "__main__":
    main()
