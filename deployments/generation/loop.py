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
from typing import NamedTuple

import numpy as np

from deployments.config import SchedulingSettings
from deployments.engines.decoder import Decoder, Logits
from deployments.errors import DeadlineExceeded, EngineFailed, Overloaded, ServeError
from deployments.generation.job import GenerationJob
from deployments.generation.messages import Chunk, Started
from deployments.generation.plan import ReadingSpeed, Unread, plan_reading
from deployments.generation.rows import Copy, Move, RowTable
from deployments.records import StepRecord, StepRecorder

log = logging.getLogger("ray.serve.hundredfold")

# Until a part was measured. Low, so that the first prompts are read in small parts.
FIRST_TOKENS_PER_S = 200.0
# Of jobs that tell their prompts' tokens: the logits behind each are kept for a moment.
MOST_TOLD_PART = 64


class Event(NamedTuple):
    """What happened to a job."""

    job: int  # its number
    what: Started | Chunk | ServeError  # an error, or a chunk that is finished, is the last


Publish = Callable[[Sequence[Event]], None]


class GenerationLoop:
    """Jobs over one decoder. `publish` is called from the loop's thread."""

    def __init__(
        self,
        decoder: Decoder,
        rules: SchedulingSettings,
        publish: Publish,
        recorder: StepRecorder,
        model_id: str,
    ) -> None:
        self.rules = rules
        self._decoder = decoder
        self._publish = publish
        self._recorder = recorder
        self._model_id = model_id
        self._rows = RowTable(decoder.info.rows)
        self._speed = ReadingSpeed(FIRST_TOKENS_PER_S)
        self._changed = threading.Condition()
        self._waiting: deque[GenerationJob] = deque()  # guarded by _changed
        self._cancelled: set[int] = set()  # guarded by _changed
        self._is_closing = False  # guarded by _changed
        self._active: dict[int, GenerationJob] = {}  # by number, first come first
        self._events: list[Event] = []
        self._step_began_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"generate {model_id}", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, job: GenerationJob) -> None:
        """Queue a job. Raises Overloaded when too many wait."""
        with self._changed:
            if len(self._waiting) >= self.rules.queue_requests or self._is_closing:
                raise Overloaded("Model is overloaded")
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: GenerationJob) -> None:
        """Let go of a job: before the next step its row is free. Nothing more is published of it.

        For jobs that are done already this does nothing.
        """
        with self._changed:
            self._cancelled.add(job.number)
            self._changed.notify()

    @property
    def load(self) -> tuple[int, int]:
        """Jobs that are being answered, and jobs that wait."""
        return len(self._active), len(self._waiting)

    def stuck_s(self) -> float:
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
                self._fail_all(error)
            except Exception as error:
                log.error("a step of %s failed, this is a bug", self._model_id, exc_info=error)
                self._fail_all(EngineFailed(f"a step failed: {error!r}"))
            self._tell()
            self._step_began_s = None

    def _wait_for_work(self) -> bool:
        """False when the loop is to end."""
        with self._changed:
            while not (self._active or self._waiting):
                self._cancelled.clear()
                if self._is_closing:
                    return False
                self._changed.wait()
        return True

    def _step(self) -> None:
        began_s = time.perf_counter()
        self._let_go()
        self._admit()
        read = self._read_prompts()
        if read:
            self._tell()  # first tokens need not wait for everybody's next one
        written = self._write_tokens()
        if read or written:
            self._recorder.record(
                StepRecord(
                    model=self._model_id,
                    compute=self._decoder.info.compute_type,
                    prompt_tokens=read,
                    answer_tokens=written,
                    active=len(self._active),
                    waiting=len(self._waiting),
                    step_s=time.perf_counter() - began_s,
                )
            )

    def _let_go(self) -> None:
        now_s = time.time()
        with self._changed:
            cancelled, self._cancelled = self._cancelled, set()
            late = [job for job in self._waiting if job.deadline_s < now_s]
            gone = cancelled.union(job.number for job in late)
            if gone:
                self._waiting = deque(job for job in self._waiting if job.number not in gone)
        for number in cancelled & self._active.keys():
            self._leave(self._active[number])
        for job in [job for job in self._active.values() if job.deadline_s < now_s]:
            self._leave(job)
            late.append(job)
        for job in late:
            if job.number not in cancelled:
                error = DeadlineExceeded("the answer took longer than it may")
                self._events.append(Event(job.number, error))

    def _admit(self) -> None:
        while self._rows.free and (job := self._next_waiting()):
            self._rows.take(job.number)
            self._enter(job)

    def _next_waiting(self) -> GenerationJob | None:
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def _enter(self, job: GenerationJob) -> None:
        job.clock.begun_s = time.perf_counter()
        self._active[job.number] = job

    def _leave(self, job: GenerationJob) -> None:
        """Free the job's row, for the next in line if there is one: then nothing has to move."""
        del self._active[job.number]
        successor = self._next_waiting()
        if successor is None:
            self._carry_out(self._rows.give_up(job.number))
        else:
            self._rows.hand_over(job.number, successor.number)
            self._enter(successor)

    def _carry_out(self, moves: Sequence[Move]) -> None:
        for move in moves:
            if isinstance(move, Copy):
                self._decoder.copy(move.source, move.target, move.tokens)
            else:
                self._decoder.exchange(move.first, move.second, move.tokens)

    def _read_prompts(self) -> int:
        """Compute parts of prompts; how many tokens."""
        unread = [job for job in self._active.values() if not job.is_read]
        jobs = {self._rows.row_of(job.number): job for job in unread}
        answering = len(self._active) - len(unread)
        waiting = [Unread(row, job.unread) for row, job in jobs.items()]
        parts = plan_reading(waiting, answering, self._speed.tokens_per_s, self.rules)
        # A job that is done at once leaves, and others' rows move: who is meant is looked up first.
        return sum(self._read_part(*meant) for meant in [(jobs[p.row], p.tokens) for p in parts])

    def _read_part(self, job: GenerationJob, tokens: int) -> int:
        row = self._rows.row_of(job.number)
        if job.unread == len(job.prompt):
            shared, moves = self._rows.begin(row, job.prompt, afresh=job.wants_prompt)
            self._carry_out(moves)
            job.cached, job.unread = shared, job.unread - shared
        tokens = min(tokens, job.unread, MOST_TOLD_PART if job.wants_prompt else job.unread)
        if job.unread - tokens == 1:  # never a single one by itself
            tokens = job.unread
        done = len(job.prompt) - job.unread
        ids = job.prompt[done : done + tokens]
        began_s = time.perf_counter()
        logits = self._decoder.prefill(row, ids, done, every=job.wants_prompt)
        self._speed.learn(tokens, time.perf_counter() - began_s, self.rules.fewest_part_tokens)
        self._rows.read(row, ids)
        job.read(tokens, logits)
        if job.is_read:
            self._events.append(Event(job.number, job.started(self._decoder.info.compute_type)))
            self._write(job, logits[-1] if job.wants_prompt else logits)
        return tokens

    def _write_tokens(self) -> int:
        """One more token for everybody whose prompt is read; how many."""
        writing = {
            self._rows.row_of(job.number): job for job in self._active.values() if job.is_read
        }
        if not writing:
            return 0
        rows = max(writing) + 1
        ids = np.zeros(rows, np.int64)
        for row, job in writing.items():
            ids[row] = job.last_token
        lengths = np.array([self._rows.filled(row) for row in range(rows)])
        logits = self._decoder.decode(ids, lengths)
        for row in writing:
            self._rows.wrote(row)
        for row, job in writing.items():
            self._write(job, logits[row])
        return len(writing)

    def _write(self, job: GenerationJob, logits: Logits) -> None:
        try:
            chunk = job.write(logits)
        except ServeError as error:
            self._events.append(Event(job.number, error))
            self._leave(job)
            return
        self._events.append(Event(job.number, chunk))
        if chunk.finished is not None:
            self._leave(job)

    def _tell(self) -> None:
        events, self._events = self._events, []
        if events:
            self._publish(events)

    def _fail_all(self, error: ServeError) -> None:
        """The engine gave up: nobody's memory can be trusted."""
        log.error("%s: %s", self._model_id, error)
        for job in list(self._active.values()):
            self._events.append(Event(job.number, error))
        self._active.clear()
        self._rows = RowTable(self._decoder.info.rows)
