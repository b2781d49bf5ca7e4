"""The loop of one decoder: requests join and leave at any step, and one call decodes them all.

A step is: take in who came and let go who left, read a little of the waiting prompts, then give
everybody whose prompt is read one more token. The loop has a thread of its own; what happens to
jobs is published once a step, for all of them together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from deployments.config import SchedulingSettings
from deployments.engines.base import MAX_CONSECUTIVE_FAILURES
from deployments.engines.decoder import DecoderEngine
from deployments.errors import DeadlineExceeded, EngineFailed, EngineLost, Overloaded, ServeError
from deployments.generation.job import Job
from deployments.generation.step_executor import NO_OUTPUT, JobEvent, StepExecutor, StepOutput
from deployments.records import StepRecord, StepRecorder

log = logging.getLogger("ray.serve.hundredfold")

Publish = Callable[[Sequence[JobEvent]], None]


class GenerationLoop:
    """Jobs over one decoder. `publish` is called from the loop's thread."""

    def __init__(
        self,
        decoder: DecoderEngine,
        rules: SchedulingSettings,
        publish: Publish,
        recorder: StepRecorder,
        model_id: str,
    ) -> None:
        self.rules = rules
        self.lost: EngineLost | None = None  # why the decoder answers no more
        self._decoder = decoder
        self._publish = publish
        self._recorder = recorder
        self._model_id = model_id
        self._stepper = StepExecutor(decoder, self._next_waiting)
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()  # guarded by _changed
        self._cancelled: set[int] = set()  # guarded by _changed
        self._is_closing = False  # guarded by _changed
        self._step_began_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"generate {model_id}", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Raises Overloaded when too many wait."""
        with self._changed:
            if len(self._waiting) >= self.rules.max_waiting_requests or self._is_closing:
                raise Overloaded(
                    f"Model is overloaded: {len(self._waiting)} requests wait for their turn"
                )
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Let go of a job: before the next step its row is free. Nothing more is published of it.

        For jobs that are done already this does nothing.
        """
        with self._changed:
            self._cancelled.add(job.number)
            self._changed.notify()

    @property
    def load(self) -> tuple[int, int]:
        """Jobs that are being answered, and jobs that wait."""
        return len(self._stepper.active), len(self._waiting)

    def step_elapsed_s(self) -> float:
        """How long the step under way has taken; 0 when there is none."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else time.perf_counter() - began_s

    def close(self) -> None:
        """Answer what is active or waiting, then stop. Blocks."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while self._wait_for_work():
            self._step_began_s = time.perf_counter()
            try:
                self._step()
            except ServeError as error:
                self._fail(error)
            except Exception as error:
                log.error("a step of %s failed, this is a bug", self._model_id, exc_info=error)
                self._fail(EngineFailed(f"a step failed: {error!r}"))
            self._tell()
            self._step_began_s = None
            if self._stepper.failures >= MAX_CONSECUTIVE_FAILURES and self.lost is None:
                self.lost = EngineLost(
                    f"{self._model_id}: the last {MAX_CONSECUTIVE_FAILURES} calls failed"
                )

    def _wait_for_work(self) -> bool:
        """False when the loop is to end."""
        with self._changed:
            while not (self._stepper.active or self._waiting):
                self._cancelled.clear()
                if self._is_closing:
                    return False
                self._changed.wait()
        return True

    def _step(self) -> None:
        began_s = time.perf_counter()
        before = len(self._stepper.active)
        self._drop_cancelled()
        self._stepper.admit()
        read = self._stepper.read_prompts(self.rules)
        if read:
            self._tell()  # first tokens need not wait for everybody's next one
        written = self._stepper.write_tokens(self.rules)
        # Who leaves last is to be seen too.
        if read or written.tokens or len(self._stepper.active) != before:
            self._record(read, written, time.perf_counter() - began_s)

    def _record(self, read: int, written: StepOutput, took_s: float) -> None:
        self._recorder.record(
            StepRecord(
                model=self._model_id,
                compute=self._decoder.info.compute_type,
                prompt_tokens=read,
                answer_tokens=written.tokens,
                draft_tokens=written.drafted,
                accepted_draft_tokens=written.accepted,
                active=len(self._stepper.active),
                waiting=len(self._waiting),
                step_s=took_s,
            )
        )

    def _drop_cancelled(self) -> None:
        now_s = time.time()
        with self._changed:
            cancelled, self._cancelled = self._cancelled, set()
            late = [job for job in self._waiting if job.deadline_s < now_s]
            gone = cancelled.union(job.number for job in late)
            if gone:
                self._waiting = deque(job for job in self._waiting if job.number not in gone)
        for number in cancelled & self._stepper.active.keys():
            self._stepper.leave(self._stepper.active[number])
        for job in [job for job in self._stepper.active.values() if job.deadline_s < now_s]:
            self._stepper.leave(job)
            late.append(job)
        for job in late:
            if job.number not in cancelled:
                error = DeadlineExceeded("the answer took longer than it may")
                self._stepper.events.append(JobEvent(job.number, error))

    def _next_waiting(self, rows: int) -> Job | None:
        """The next in line, if so many rows are enough for it; nobody goes before it."""
        with self._changed:
            has_room = bool(self._waiting) and self._waiting[0].width <= rows
            return self._waiting.popleft() if has_room else None

    def _fail(self, error: ServeError) -> None:
        log.error("%s: %s", self._model_id, error)
        if isinstance(error, EngineLost):
            self.lost = error
        self._stepper.fail_all(error)
        self._record(0, NO_OUTPUT, self.step_elapsed_s())  # nobody is left

    def _tell(self) -> None:
        events, self._stepper.events = self._stepper.events, []
        if events:
            self._publish(events)
