"""One chaos run: starts the driver, stops it at times, lets strangers call, audits what came.

The driver is another process, since it is stopped, too; and so that what is left of it, and of
all that it started, can be looked for when it is gone.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from envbus.bus.interrupts import interruptible, uninterrupted
from envbus.runner.chaos.audit import Audit, audit_env
from envbus.runner.chaos.leaks import ResourceSample, marked_processes, sample, shared_files
from envbus.runner.chaos.messages import MARK, ChaosProgress, DriverConfig, Line, Result
from envbus.runner.chaos.records import read_journal, read_ledger
from envbus.runner.chaos.result import ChaosResult, Leftovers, Observed, judge
from envbus.runner.chaos.strangers import Strangers

__all__ = ["ChaosConfig", "run_chaos"]

#: Seconds between two samples of what is held.
_SAMPLE_EVERY = 1.0
#: Seconds of silence after which the driver is taken for hung; it tells something each 0.25 s.
_SILENCE = 30.0
#: Seconds that a look at the driver takes at most, unless this process was stopped itself.
_SHORT = 0.1
#: Seconds that nothing done here takes: it was stopped, or the machine stood still.
_STANDSTILL = 3.0
#: Seconds that it has to end after its result, and that what it started has after that.
_END = 20.0
_LEFT_BEHIND = 3.0
_READ_BYTES = 65536
#: Lines of the driver's standard error that a report shows.
_LAST_LINES = 40

OnProgress = Callable[[str, ChaosProgress], None]


class ChaosConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is run. Durations in seconds."""

    seconds: float = 120.0
    #: Of the same pool while nothing is broken.
    calm_seconds: float = 10.0
    seed: int = 0
    num_envs: int = 16
    num_actors: int = 4
    local_links: bool = True
    shared_memory: bool = True


def run_chaos(config: ChaosConfig, on_progress: OnProgress) -> ChaosResult:
    """Run calm, run chaos, audit, and return the result.

    Args:
        config: What to run.
        on_progress: Called some times a second with `"calm"` or `"chaos"` and where it is.
    """
    # What is to be removed, and who is to be ended, is known whenever a signal is told.
    with uninterrupted(), tempfile.TemporaryDirectory(prefix="envbus-chaos-") as name:
        folder = Path(name)
        calm = _drive(config, folder / "calm", on_progress, chaos=False)
        broken = _drive(config, folder / "chaos", on_progress, chaos=True)
        # A driver that failed has not written its journal to the end.
        audits = [] if broken.result is None else _audit(folder / "chaos", config.num_envs)
    return judge(msgspec.to_builtins(config), calm, broken, audits)


def _audit(folder: Path, num_envs: int) -> list[Audit]:
    return [
        audit_env(env_id, events, read_ledger(folder, env_id))
        for env_id, events in enumerate(read_journal(folder, num_envs))
    ]


def _drive(config: ChaosConfig, folder: Path, on_progress: OnProgress, *, chaos: bool) -> Observed:
    (folder / "tmp").mkdir(parents=True)
    before = shared_files()
    mark = secrets.token_hex(8)
    driver_config = DriverConfig(
        folder=str(folder),
        seconds=config.seconds if chaos else config.calm_seconds,
        seed=config.seed,
        num_envs=config.num_envs,
        num_actors=config.num_actors,
        local_links=config.local_links,
        shared_memory=config.shared_memory,
        chaos=chaos,
    )
    with (folder / "stderr").open("w+b") as errors:
        run = _Run(driver_config, mark, errors.fileno(), on_progress)
        try:
            with interruptible():
                run.until_end()
        finally:
            left = run.end(mark)
        errors.seek(0)
        last = errors.read().decode("utf-8", "replace").splitlines()[-_LAST_LINES:]
    leftovers = Leftovers(
        processes=left,
        socket_files=sorted(path.name for path in (folder / "tmp").rglob("*")),
        shared_files=sorted(shared_files() - before),
        shared_by_us=sorted({name for found in run.samples for name in found.shared_files}),
    )
    return Observed(
        result=run.result,
        failure=f"{run.failure}\n" + "\n".join(last) if run.failure else "",
        samples=run.samples,
        at_start=run.at_start,
        at_end=run.at_end,
        stood_still=round(run.stood_still, 1),
        left=leftovers,
    )


class _Run:
    """One driver process, from start to end."""

    def __init__(
        self, config: DriverConfig, mark: str, errors: int, on_progress: OnProgress
    ) -> None:
        self.result: Result | None = None
        #: Why there is no result.
        self.failure = ""
        self.samples: list[ResourceSample] = []
        self.at_start: ResourceSample | None = None
        self.at_end: ResourceSample | None = None
        self._seed = config.seed
        self._label = "chaos" if config.chaos else "calm"
        self._on_progress = on_progress
        self._strangers: Strangers | None = None
        self._start = time.monotonic()
        self._next_sample = 0.0
        self._silence = 0.0
        #: Seconds in which this process did not run.
        self.stood_still = 0.0
        self._frozen_until = 0.0
        self._received = b""
        folder = Path(config.folder, "tmp")
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [
                *(sys.executable, "-m", "envbus.runner.chaos.driver"),
                msgspec.json.encode(config).decode(),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, MARK: mark, "TMPDIR": str(folder)},
            start_new_session=True,  # Ctrl-C is ours
        )

    def until_end(self) -> None:
        """Serve the driver until it has told its result, failed, or fallen silent."""
        assert self._process.stdout is not None
        poller = select.poll()
        poller.register(self._process.stdout, select.POLLIN)
        now = time.monotonic()
        while self.result is None and not self.failure:
            before, now = now, time.monotonic()
            if now - before > _STANDSTILL:
                self.stood_still += now - before
            self._thaw(now)
            if self.at_start is not None and now >= self._next_sample:
                self._next_sample = now + _SAMPLE_EVERY
                self._keep(self._sample())
            if poller.poll(20):
                self._read(self._process.stdout.fileno())
                self._silence = 0.0
            elif not self._frozen_until:
                # Counted only while this process runs: whoever stops one may stop the other.
                self._silence += min(time.monotonic() - now, _SHORT)
            if self._silence > _SILENCE:
                for _ in range(2):  # whether it waits or spins
                    self._process.send_signal(signal.SIGUSR1)  # its stacks, to standard error
                    time.sleep(0.5)
                self.failure = f"the driver hung: it was silent for {_SILENCE:g} s"

    def end(self, mark: str) -> list[str]:
        """End what runs; return what was left behind by a driver that ended by itself."""
        if self.result is None:
            self._process.kill()
        with suppress(psutil.NoSuchProcess):
            psutil.Process(self._process.pid).resume()
        try:
            code = self._process.wait(_END)
        except subprocess.TimeoutExpired:
            self.failure = self.failure or f"the driver did not end within {_END:g} s"
            self._process.kill()
            code = self._process.wait()
        if code != 0 and not self.failure:
            self.failure = f"the driver ended with {code}"
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
        if self._strangers is not None:
            self._strangers.close()
        deadline = time.monotonic() + _LEFT_BEHIND
        while (left := marked_processes(MARK, mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        names = []
        for process in left:
            with suppress(psutil.Error):
                names.append(" ".join(process.cmdline())[:200])
                process.kill()
        return names

    def _read(self, fd: int) -> None:
        chunk = os.read(fd, _READ_BYTES)
        if not chunk:
            self.failure = f"the driver ended with {self._process.wait(_END)} in the middle"
            return
        *lines, self._received = (self._received + chunk).split(b"\n")
        for text in lines:
            self._take(msgspec.json.decode(text, type=Line))

    def _take(self, line: Line) -> None:
        if line.progress is not None:
            self._on_progress(self._label, line.progress)
        elif line.freeze is not None:
            self._frozen_until = time.monotonic() + line.freeze
            self._process.send_signal(signal.SIGSTOP)
        elif line.stranger is not None and self._strangers is not None:
            self._strangers.call(line.stranger)
        elif line.ready is not None:
            self._strangers = Strangers(line.ready[0], self._seed)
            self.at_start = self._sample()
        elif line.settled:
            self.at_end = self._sample()
            assert self._process.stdin is not None
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        elif line.result is not None:
            self.result = line.result

    def _thaw(self, now: float) -> None:
        if self._frozen_until and now >= self._frozen_until:
            self._frozen_until = 0.0
            self._process.send_signal(signal.SIGCONT)

    def _sample(self) -> ResourceSample | None:
        return sample(self._process.pid, time.monotonic() - self._start)

    def _keep(self, found: ResourceSample | None) -> None:
        if found is not None:
            self.samples.append(found)
