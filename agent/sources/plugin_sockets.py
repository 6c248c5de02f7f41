"""The Unix sockets at which the agent hears engines' plugins, and the engines of their senders."""

import fcntl
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.errors import SettingsInvalid
from agent.sources.host.procfs import Procfs, Stat

# A plugin sends datagrams of 32 KB at most.
_DATAGRAM_BYTES = 65_536
# pid, uid and gid of the sender, which the kernel checks: unix(7). No descriptors fit beside them.
_CREDENTIALS = struct.Struct("@iII")
_ANCILLARY_BYTES = socket.CMSG_LEN(_CREDENTIALS.size)
# For the agent's user and group: in a pod, the group is `fsGroup`.
_MODE = 0o660


class SocketUnusable(SettingsInvalid):
    """No socket can be made at a path; the message says why."""

    def __init__(self, problem: str) -> None:
        super().__init__([problem])


class SocketTaken(SocketUnusable):
    """A program listens at the path."""


def default_places() -> tuple[Path, ...]:
    """Where an engine and an agent without settings look for each other's socket, in this order.

    `plugins/vllm/goodput_agent_vllm/sending.py` has the same.
    """
    uid = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"
    folders = ("/run/goodput-agent", f"{runtime}/goodput-agent", f"/tmp/goodput-agent-{uid}")
    return tuple(Path(folder, "vllm.sock") for folder in folders)


@dataclass(slots=True)
class _Sender:
    started_ticks: int
    engine: str | None
    look_again_s: float
    said: bool = False


# An engine's front reports that it is there before it listens.
_LOOK_AGAIN_S = 0.1
_MAX_SENDERS = 1024


class SenderLookup:
    """Finds the engine of a process: the one at whose port it, its parent or a child listens.

    An answer stays until the process ends, and after that until another one has its PID.
    """

    def __init__(
        self,
        engines: Mapping[int, str],
        proc: Path = Path("/proc"),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engines` has the engines of this machine by their port."""
        self._engines = engines
        self._folder = proc
        self._proc = Procfs(proc)
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._senders: dict[int, _Sender] = {}

    def engine_of(self, pid: int) -> str | None:
        """The engine of a process; None if it is unknown."""
        with self._lock:
            stat_, sender = self._proc.stat(pid), self._senders.get(pid)
            if stat_ is None:
                return None if sender is None else sender.engine
            if sender is None or sender.started_ticks != stat_.started_ticks:
                sender = self._remember(pid, _Sender(stat_.started_ticks, None, 0.0))
            if sender.engine is None and self._monotonic() >= sender.look_again_s:
                sender.engine = self._found(stat_)
                sender.look_again_s = self._monotonic() + _LOOK_AGAIN_S
            return sender.engine

    def why_unknown(self, pid: int) -> str | None:
        """Why the engine of a process is unknown; None if this was asked before."""
        with self._lock:
            sender = self._senders.get(pid) or self._remember(pid, _Sender(0, None, 0.0))
            if sender.said:
                return None
            sender.said = True
        if self._proc.stat(pid) is None:
            return "it has ended, or is in another PID namespace"
        if not os.access(self._folder / f"{pid}/fd", os.R_OK):
            return "it is of another user, so its ports are not known"
        return f"it does not listen on port {', '.join(map(str, sorted(self._engines)))}"

    def _remember(self, pid: int, sender: _Sender) -> _Sender:
        self._senders.pop(pid, None)
        self._senders[pid] = sender
        if len(self._senders) > _MAX_SENDERS:
            self._senders.pop(next(iter(self._senders)))
        return sender

    def _found(self, sender: Stat) -> str | None:
        try:
            listening = self._proc.listening().items()
        except OSError:
            return None
        engines = {inode: self._engines[port] for inode, port in listening if port in self._engines}
        if not engines:
            return None
        for pid in (sender.pid, sender.parent, *self._proc.children(sender.pid)):
            for inode in self._proc.sockets(pid):
                if inode in engines:
                    return engines[inode]
        return None


@dataclass(frozen=True, slots=True)
class _Listener:
    """A bound socket, and the device and inode of the file that the bind made."""

    path: Path
    opened: socket.socket
    file: tuple[int, int] | None


class PluginSocket:
    """One socket of plugins: that of one `engine`, or the shared one of the `senders`' engines.

    A shared socket is at the first of its places that can be made, and never replaces one at which
    a program listens. In all places but the first, the folder must be of this user alone.
    """

    def __init__(
        self,
        places: Sequence[Path],
        engine: str | None = None,
        senders: SenderLookup | None = None,
    ) -> None:
        """With both, `engine` has the records of unknown senders."""
        self.engine = engine
        self.senders = senders
        self._places = tuple(places)
        self._listener: _Listener | None = None

    @property
    def path(self) -> Path | None:
        """Where it listens; None while it does not, or its file was deleted or replaced."""
        listener = self._listener
        return listener.path if listener and _file_at(listener.path) == listener.file else None

    @property
    def opened(self) -> socket.socket | None:
        """What it listens with, also after its file was deleted."""
        return None if self._listener is None else self._listener.opened

    def engine_of(self, pid: int) -> str | None:
        """The engine of a process that sent something; None if it is unknown."""
        return (self.senders and self.senders.engine_of(pid)) or self.engine

    def open(self) -> socket.socket:
        """Listen, and return what datagrams come to. Raises SocketUnusable."""
        problems = []
        for place in self._places:
            try:
                self._listener = self._opened(place)
            except SocketUnusable as error:
                problems.append(str(error))
                if isinstance(error, SocketTaken):
                    # The plugins send there.
                    break
            else:
                return self._listener.opened
        raise self._unusable("; ".join(problems))

    def try_open(self, *, in_use: bool) -> None:
        """Raises SocketUnusable if `open` would. A socket `in_use` may be replaced."""
        if not in_use:
            self.open()
            self.close()
            return
        path = self._places[0]
        if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
            raise self._unusable(f"{path} is a file and no socket")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise self._unusable(f"no socket can be made in {path.parent}")

    def _opened(self, place: Path) -> _Listener:
        private = place is not self._places[0]
        try:
            place.parent.mkdir(0o700 if private else 0o777, exist_ok=True)
            if self.engine is not None:
                return _listening(place)
            with _locked(place.parent, private=private):
                return _listening(place)
        except OSError as error:
            reason = error.strerror or error
            raise SocketUnusable(f"cannot listen at {place}: {reason}") from error

    def _unusable(self, problem: str) -> SocketUnusable:
        if self.engine is None:
            return SocketUnusable(f"agent_socket: {problem}")
        return SocketUnusable(
            f"plugin_socket of engine {self.engine}: {problem}; choose another path"
        )

    def receive(self) -> tuple[bytes, int] | None:
        """The next datagram and its sender's PID, which is 0 in another PID namespace.

        None if there is none now. A datagram that is too long is empty.
        """
        if self._listener is None:
            return None
        try:
            datagram, ancillary, flags, _ = self._listener.opened.recvmsg(
                _DATAGRAM_BYTES, _ANCILLARY_BYTES, socket.MSG_DONTWAIT
            )
        except OSError:
            return None
        return b"" if flags & socket.MSG_TRUNC else datagram, _pid_in(ancillary)

    def close(self) -> None:
        """Stop listening. A file of another program stays."""
        if self._listener is not None:
            # The open socket keeps the inode, so the file of another program has another one.
            if self.path is not None:
                self._listener.path.unlink(missing_ok=True)
            self._listener.opened.close()
            self._listener = None


def _pid_in(ancillary: Sequence[tuple[int, int, bytes]]) -> int:
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid: int = _CREDENTIALS.unpack(content)[0]
            return pid
    return 0


@contextmanager
def _locked(folder: Path, *, private: bool) -> Iterator[None]:
    """Lock a folder: of two agents that replace a left socket, one would remove the other's.

    Raises SocketTaken if another agent has the lock, SocketUnusable if others may write to a
    `private` folder.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if private else 0)
    descriptor = os.open(folder, flags)
    try:
        found = os.fstat(descriptor)
        if private and (found.st_uid != os.geteuid() or found.st_mode & 0o022):
            raise SocketUnusable(f"{folder} is not a folder of this user alone")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise SocketTaken(f"another agent begins to listen in {folder}") from error
    finally:
        os.close(descriptor)


def _listening(path: Path) -> _Listener:
    """A new socket at this path, also in place of one without a reader.

    Raises SocketUnusable and OSError.
    """
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        _require_free(path)
        path.unlink(missing_ok=True)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        # The bind makes the file with this mode less the umask.
        os.fchmod(opened.fileno(), _MODE)
        opened.bind(str(path))
        os.chmod(path, _MODE)
    except BaseException:
        opened.close()
        raise
    return _Listener(path, opened, _file_at(path))


def _file_at(path: Path) -> tuple[int, int] | None:
    """Device and inode of what is at a path; None if nothing can be seen."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _require_free(path: Path) -> None:
    """Raises SocketUnusable unless nothing is here, or a socket that its program left.

    Raises OSError if that cannot be seen.
    """
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise SocketUnusable(f"{path} is a file and no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            probe.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return
    except PermissionError:
        raise
    except OSError as error:
        # Such as EPROTOTYPE of a stream socket.
        raise SocketTaken(f"{path} is the socket of another program") from error
    raise SocketTaken(f"{path} is the socket of another program")
