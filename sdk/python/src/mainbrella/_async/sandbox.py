"""One generation of a machine, and everything that can be done with it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import overload

from .._paths import ReadableBinary, WritableBinary
from .._wire import check_key, check_on_idle
from ..egresstypes import Policy
from ..errors import (
    CallerStoppedWaitingError,
    CleanupUncertainError,
    CommandFailedError,
    ConfigurationError,
    CreateFailedError,
    GenerationMismatchError,
    MainbrellaError,
    NotFoundError,
    TransportError,
    UnavailableError,
)
from ..filetypes import UploadedTree
from ..jobs import ProcessList, parse_processes
from ..models import ForkReceipt, MachineInfo, StopResult, drop_none, parse_fork, parse_machine, parse_stop
from ..secrettypes import Secret, check_handed_on
from ..snapshottypes import Snapshot
from . import net, saving
from .api import AsyncMachineApi
from .commands import AsyncCommands
from .contexts import AsyncCodeContext, create_code_context, list_code_contexts
from .egress import AsyncEgress
from .files import AsyncFiles, AsyncRemoteFile
from .jobs import AsyncRunResult, signal_value
from .previews import AsyncPreviews
from .secrets import AsyncSecrets
from .transport import AsyncTransport

__all__ = ["AsyncSandbox"]

_STOP_ATTEMPTS = 4
_STOP_WAIT_SECONDS = 120.0
_PAUSE_WAIT_SECONDS = 360.0


class AsyncSandbox:
    """A machine, named by the pair ``(id, created_at)``: every call acts on that generation or fails.

    Made by ``client.create`` or ``AsyncSandbox.create``, it owns its clean-up: leaving its ``with`` block stops that
    generation and no other.
    Made by ``connect``, ``get`` or ``list``, leaving a ``with`` block does nothing.
    """

    commands: AsyncCommands
    """Runs commands and jobs."""
    files: AsyncFiles
    """Reads, writes, lists, moves, watches files."""
    egress: AsyncEgress
    """What it may reach, and what it was not let through to."""
    secrets: AsyncSecrets
    """Credentials that its requests carry and that it never sees."""
    previews: AsyncPreviews
    """Makes ports reachable for a while."""
    api: AsyncMachineApi
    """Generation-bound calls, for what has no method here."""

    def __init__(
        self, transport: AsyncTransport, info: MachineInfo, *, owned: bool, owns_transport: bool = False
    ) -> None:
        self._info = info
        self._owned = owned
        self._owns_transport = owns_transport
        self._fork_receipt: ForkReceipt | None = None
        self.api = AsyncMachineApi(transport, info.id, info.created_at)
        self.commands = AsyncCommands(self)
        self.files = AsyncFiles(self.api)
        self.egress = AsyncEgress(self)
        self.secrets = AsyncSecrets(self)
        self.previews = AsyncPreviews(self)

    @classmethod
    async def create(
        cls,
        template: str = "python",
        *,
        persistent: bool = False,
        ttl_seconds: int = 3600,
        metadata: Mapping[str, str] | None = None,
        size: str = "small",
        internet: bool | None = None,
        egress: Policy | None = None,
        slot: str | None = None,
        idle_timeout_seconds: int | None = None,
        on_idle: str = "stop",
        auto_resume: bool | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Iterable[Secret] | None = None,
        idempotency_key: str | None = None,
        api_key: str | None = None,
        base_url: str | None = None,
    ) -> AsyncSandbox:
        """The short form: a client of its own, from ``MAINBRELLA_API_KEY`` and ``MAINBRELLA_API_URL``, and a machine.

        The arguments are those of ``client.create``; ``template`` is its ``catalog_id``, and ``agent`` means ``python``
        on a host without a template of that name. Use it in a ``with`` block, or call ``kill()`` at the end.
        """
        from .client import AsyncMainbrella

        client = AsyncMainbrella(api_key, base_url=base_url)
        try:
            if template == "agent" and all(known.get("name") != "agent" for known in await client.templates()):
                template = "python"
            sandbox = await client.create(
                template,
                size=size,
                internet=internet,
                egress=egress,
                slot=slot,
                ttl_seconds=ttl_seconds,
                idle_timeout_seconds=idle_timeout_seconds,
                on_idle=on_idle,
                auto_resume=auto_resume,
                metadata=metadata,
                env=env,
                secrets=secrets,
                persistent=persistent,
                idempotency_key=idempotency_key,
            )
        except BaseException:
            await client.close()
            raise
        return cls(sandbox.api.transport, sandbox.info, owned=True, owns_transport=True)

    @property
    def fork_receipt(self) -> ForkReceipt | None:
        """What was done for this copy of another machine; ``None`` for others, and where an earlier call made it."""
        return self._fork_receipt

    @property
    def id(self) -> str:
        """The slot."""
        return self._info.id

    @property
    def created_at(self) -> str:
        """When this generation was created, RFC 3339."""
        return self._info.created_at

    @property
    def info(self) -> MachineInfo:
        """What the service last said of it; ``inspect()`` asks again."""
        return self._info

    @property
    def state(self) -> str:
        """Its state as last heard; ``inspect()`` asks again."""
        return self._info.state

    @property
    def filesystem(self) -> AsyncFiles:
        """``files`` by its other name."""
        return self.files

    async def inspect(self) -> MachineInfo:
        """Asks the service what this generation is doing. This does not count as use of the machine."""
        return self._learn(parse_machine(await self.api.get("")))

    refresh = inspect

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        check: bool = False,
        timeout_seconds: float = 60.0,
        cwd: str | None = None,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        output_limit: int | None = None,
    ) -> AsyncRunResult:
        """``commands.run`` with seconds. With ``check``, anything but exit code 0 raises ``CommandFailedError``."""
        if not timeout_seconds > 0:
            raise ConfigurationError("timeout_seconds must be a positive number of seconds.")
        result = await self.commands.run(
            command,
            timeout_ms=max(1, round(timeout_seconds * 1000)),
            cwd=cwd,
            user=user,
            env=env,
            stdin=stdin,
            output_limit=output_limit,
        )
        if check and not result.ok:
            how = f"ended with {result.exit_code}"
            if result.timed_out:
                how = f"ran into its limit of {timeout_seconds:g} seconds"
            error = CommandFailedError(f"The command {how}.", hint=result.stderr[-500:].strip())
            error.result = result
            raise error
        return result

    async def create_code_context(
        self, language: str = "python", *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> AsyncCodeContext:
        """Starts an interpreter whose state lasts from one ``run_code`` to the next. Several can run at once.

        Args:
            language: ``python``.
            cwd: working directory, absolute.
            env: variables over those of the machine. The machine can read them.
        """
        return await create_code_context(self, language, cwd=cwd, env=env)

    async def code_contexts(self) -> list[AsyncCodeContext]:
        """The code contexts of this machine."""
        return await list_code_contexts(self)

    async def processes(self) -> ProcessList:
        """Every process of the machine, not only those of commands."""
        return parse_processes(await self.api.get("/processes"))

    async def signal_process(self, pid: int, signal: str | int = "SIGTERM") -> None:
        """Sends a signal to one process, by its pid in the machine. Sent once."""
        await self.api.post(f"/processes/{int(pid)}/signal", {"signal": signal_value(signal)})

    async def kill_process(self, pid: int) -> None:
        """``signal_process`` with ``SIGKILL``."""
        await self.signal_process(pid, "SIGKILL")

    async def extend(
        self,
        *,
        ttl_seconds: int | None = None,
        idle_timeout_seconds: int | None = None,
        on_idle: str | None = None,
        auto_resume: bool | None = None,
    ) -> MachineInfo:
        """Changes the lease. What is not given stays as it is.

        Args:
            ttl_seconds: the machine may live at least so long from now; never shortens what it already has.
            idle_timeout_seconds: it ends when nobody uses it for so long, counted from now.
            on_idle: ``"stop"``, or ``"pause"``: then it is paused instead. ``"pause"`` needs an idle timeout.
            auto_resume: whether the next use resumes it when it is paused. ``None``: it does from when ``on_idle`` becomes ``"pause"``.
        """
        body = drop_none(
            {
                "ttlSeconds": ttl_seconds,
                "idleTimeoutSeconds": idle_timeout_seconds,
                "onIdle": None if on_idle is None else check_on_idle(on_idle),
                "autoResume": auto_resume,
            }
        )
        if not body:
            raise ConfigurationError("Say ttl_seconds, idle_timeout_seconds, on_idle or auto_resume.")
        return self._learn(parse_machine(await self.api.post("/extend", body)))

    @overload
    async def fork(
        self,
        *,
        ttl_seconds: int = 3600,
        idle_timeout_seconds: int | None = None,
        metadata: Mapping[str, str] | None = None,
        secrets: Mapping[str, str | Mapping[str, str]] | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncSandbox: ...

    @overload
    async def fork(
        self,
        n: int,
        *,
        ttl_seconds: int = 3600,
        idle_timeout_seconds: int | None = None,
        metadata: Mapping[str, str] | None = None,
        secrets: Mapping[str, str | Mapping[str, str]] | None = None,
        idempotency_key: str | None = None,
    ) -> list[AsyncSandbox]: ...

    async def fork(
        self,
        n: int | None = None,
        *,
        ttl_seconds: int = 3600,
        idle_timeout_seconds: int | None = None,
        metadata: Mapping[str, str] | None = None,
        secrets: Mapping[str, str | Mapping[str, str]] | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncSandbox | list[AsyncSandbox]:
        """Copies the machine as it is now: memory, processes, disk, jobs with their logs. It goes on, and so does each copy.

        Without ``n`` it returns one machine, with ``n`` a list of that many (at most 8). Each owns its clean-up as one made by
        ``create`` does. Previews stay with the source, and secrets that were not set with ``on_fork="inherit"``. All attempts of one call carry one idempotency key.

        Args:
            n: how many.
            ttl_seconds: how long each may live.
            idle_timeout_seconds: when nobody uses one for so long it ends; default: as the source.
            metadata: labels, over those of the source.
            secrets: what each gets of secrets of the machine, by their names, whatever they were set with: ``"drop"``,
                ``"inherit"``, or ``{"reissue": value}`` for another value. ``fork_receipt`` of each says what was done.
            idempotency_key: the caller's own key; the same key and arguments give the same machines.
        """
        if n is not None and n < 1:
            raise ConfigurationError("n must be at least 1.")
        body = drop_none(
            {
                "count": 1 if n is None else n,
                "ttlSeconds": ttl_seconds,
                "idleTimeoutSeconds": idle_timeout_seconds,
                "metadata": dict(metadata) if metadata else None,
                "secrets": check_handed_on(secrets),
            }
        )
        transport = self.api.transport
        made = await transport.keyed(
            self.api.path + "/fork",
            body,
            parse_fork,
            query={"createdAt": self.created_at},
            key=check_key(idempotency_key),
            timeout=_PAUSE_WAIT_SECONDS,
        )
        children = [AsyncSandbox(transport, info, owned=True) for info in made.children if info.state != "failed"]
        for child in children:
            child._fork_receipt = made.receipts.get((child.id, child.created_at))
        if len(children) < (n or 1):
            for child in children:
                await child.kill()
            raise CreateFailedError(
                f"Only {len(children)} of {n or 1} copies could be made; they were stopped.",
                code="create_failed",
                hint="Inspect the machines that failed; `mainbrella doctor` checks the host.",
            )
        return children[0] if n is None else children

    async def pause(self) -> MachineInfo:
        """Saves memory and disk and ends every process of the machine until it is resumed.

        Jobs, code contexts and open files go on then; its connections and transfers end now, its previews lead on afterwards. The hard lease goes on
        counting, the idle timeout does not. Pausing a paused machine is no error.
        """
        return self._learn(parse_machine(await self.api.post("/pause", extra_wait=_PAUSE_WAIT_SECONDS)))

    async def resume(self) -> MachineInfo:
        """Brings the paused machine back, on the same generation; no lease changes. Resuming a running machine is no error."""
        return self._learn(parse_machine(await self.api.post("/resume", extra_wait=_PAUSE_WAIT_SECONDS)))

    async def save_workspace(
        self, name: str, *, stop: bool = False, idempotency_key: str | None = None, ttl_seconds: int | None = None
    ) -> Snapshot:
        """Saves the disk of the running machine; ``client.workspaces.restore(saved["id"])`` starts another one from it.

        It returns when what was saved is on the host's disk for good. Processes and memory are not saved, nor are
        secrets. All attempts of one call carry one idempotency key; after an error whose ``ambiguous`` is true call
        again with the same arguments and ``idempotency_key=error.idempotency_key``.

        Args:
            name: to be shown in lists; several may have the same.
            stop: stop the machine when it is saved.
            idempotency_key: generated when not given; kept for a day.
            ttl_seconds: it is removed after so long; ``None``: when somebody deletes it.

        Raises:
            SnapshotLimitError: the project has as many as it may.
            UnsupportedError: this host cannot save machines.
        """
        return await saving.save(
            self, "workspace", name, stop=stop, ttl_seconds=ttl_seconds, idempotency_key=idempotency_key
        )

    async def save_snapshot(
        self, name: str, *, stop: bool = False, idempotency_key: str | None = None, ttl_seconds: int | None = None
    ) -> Snapshot:
        """``save_workspace`` with memory: processes, jobs with their logs and code contexts come back, too.

        ``client.snapshots.restore(saved["id"])`` starts a machine from it.
        """
        return await saving.save(
            self, "full", name, stop=stop, ttl_seconds=ttl_seconds, idempotency_key=idempotency_key
        )

    async def export_workspace(self) -> bytes:
        """What is in ``/workspace``, as a tar archive packed with gzip, of at most 16 MiB.

        Raises ``PayloadTooLargeError`` where it is larger; ``export_workspace_to`` copies one of any size.
        """
        return await saving.export(self.api)

    async def export_workspace_to(self, target: str | os.PathLike[str] | WritableBinary) -> int:
        """Copies the archive of ``/workspace`` into a file, by path or open; returns its size. In flat memory."""
        return await saving.export_to(self.api, target)

    async def open_workspace(self) -> AsyncRemoteFile:
        """Opens the archive of ``/workspace`` for reading, piece by piece."""
        return await saving.open_export(self.api)

    async def import_workspace(
        self, source: str | os.PathLike[str] | bytes | ReadableBinary | net.Pieces
    ) -> UploadedTree:
        """Unpacks into ``/workspace``; what is there and not in the archive stays. In flat memory, and never repeated.

        Args:
            source: a tar archive, packed with gzip or not: its path, its bytes, an open file or pieces; or the path of
                a folder, whose contents are sent.
        """
        return await saving.import_archive(self, source)

    async def kill(self) -> StopResult:
        """Stops exactly this generation; files in it are lost. Safe to repeat, also after it has ended.

        Raises ``GenerationMismatchError`` when the slot has passed to a newer machine: this one has ended then.

        A stop is fenced by the generation and idempotent, so it is the one change that is sent again by itself when
        the network fails.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                data = await self.api.post("/stop", extra_wait=_STOP_WAIT_SECONDS)
                result = parse_stop(data)
            except (TransportError, UnavailableError) as error:
                if attempt >= _STOP_ATTEMPTS or isinstance(error, CallerStoppedWaitingError):
                    raise
            else:
                self._learn(result.info)
                if result.stopped or attempt >= _STOP_ATTEMPTS:
                    if self._owns_transport:
                        self.api.transport.drop_idle()
                    return result
            await net.sleep(0.2 * 2 ** (attempt - 1))

    stop = kill

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._owned:
            return
        try:
            result = await self.kill()
            if result.stopped:
                return
            trouble: MainbrellaError = CleanupUncertainError(
                f"Machine {self.id} was stopped, but its clean-up is not confirmed.",
                hint="The service goes on with it; kill() again to see the outcome.",
            )
        except (NotFoundError, GenerationMismatchError):
            # This generation is gone: what is in the slot now, if anything, is not ours.
            return
        except MainbrellaError as failure:
            trouble = failure
        if error is None:
            raise trouble
        note = getattr(error, "add_note", None)
        if note is not None:
            note(f"mainbrella: stopping machine {self.id}@{self.created_at} also failed: {trouble}")

    def __repr__(self) -> str:
        return f"Sandbox(id={self.id!r}, created_at={self.created_at!r}, state={self.state!r})"

    def _learn(self, info: MachineInfo) -> MachineInfo:
        if (info.id, info.created_at) != (self.id, self.created_at):
            raise GenerationMismatchError(
                "The service answered about another generation.",
                code="generation_mismatch",
                hint="Report this: an answer must never be about a machine that was not named.",
            )
        self._info = info
        return info
