"""Scheduler of one decoder with continuous batching: jobs join and leave between steps.

A step drops cancelled and late jobs, activates waiting jobs, prefills chunks of prompts and runs
one decode step for all prefilled jobs. The steps run on a thread of their own, which publishes the
events of all jobs together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from deployments.config import SchedulingSettings
from deployments.deadlines import is_expired
from deployments.engines.decoder import DecoderEngine
from deployments.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineLost,
    Overloaded,
    ServeError,
    hide_details,
)
from deployments.generation.admission import AdmissionQueue
from deployments.generation.forecast import Forecast
from deployments.generation.job import Demand, Job
from deployments.generation.step_executor import StepExecutor
from deployments.generation.step_results import (
    NO_OUTPUT,
    NO_PROMPTS,
    JobEvent,
    PrefillOutput,
    StepOutput,
)
from deployments.health import WorkerHealth
from deployments.host.thread_priority import lower_thread_priority
from deployments.messages import Chunk, FinishReason
from deployments.records import StepRecord, StepRecorder
from deployments.safety_factor import Prediction

log = logging.getLogger("ray.serve.hundredfold")

Publish = Callable[[Sequence[JobEvent]], None]


class SlotUse(NamedTuple):
    used: int  # KV slots; a beam search uses several
    waiting: int  # jobs


class GenerationScheduler:
    """The queue and the steps of one decoder.

    `publish` and `read_settings` are called in the thread of the steps and in the threads that call
    `submit` or `check`. Every step reads the settings again.
    """

    def __init__(
        self,
        decoder: DecoderEngine,
        read_settings: Callable[[], SchedulingSettings],
        publish: Publish,
        recorder: StepRecorder,
        health: WorkerHealth,
    ) -> None:
        """Take the id of the model from the subject of `health`."""
        self.health = health
        self._decoder = decoder
        self._read_settings = read_settings
        self._publish = publish
        self._recorder = recorder
        self._model_id = model_id = health.subject
        self._forecast = Forecast(decoder.info.slots)
        self._ended_s = 0.0  # time.perf_counter after the last step; 0 if no job was active then
        self._executor = StepExecutor(decoder, self._next_waiting, self.health)
        self._changed = threading.Condition()  # reentrant: `submit` calls `check`
        self._waiting = AdmissionQueue(self._forecast, decoder.info.slots)  # guarded by _changed
        self._cancelled: set[int] = set()  # guarded by _changed
        self._is_closing = False  # guarded by _changed
        self._thread = threading.Thread(target=self._run, name=f"generate {model_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self, demand: Demand) -> Prediction:
        """Predict the end of a job. Raise Overloaded if the job would be rejected now.

        Callers check before they prepare a job, because preparation takes time.
        """
        with self._changed:
            if self._is_closing:
                raise Overloaded("this replica is stopping; retry")
            running = list(self._executor.active.values())
            return self._waiting.check(demand, running, self._read_settings())

    def submit(self, job: Job) -> None:
        """Queue a job. The queue may still drop the job before it starts.

        The queue drops jobs that become late. If a new job makes the queue too long, the queue
        drops its last job.

        Raises Overloaded if the job cannot keep its deadline, too many jobs are ahead of it or the
        scheduler is closing. Raises ModelUnavailable if the model is in quarantine.
        """
        with self._changed:
            prediction = self.check(job.demand)
            self.health.admit()
            dropped = self._waiting.push(job, prediction, self._read_settings())
            self._changed.notify()
        if dropped:
            self._publish([JobEvent(each.job.number, each.error) for each in dropped])

    def cancel(self, job: Job) -> None:
        """Drop a waiting or active job before the next step, without an error event.

        The running step may still publish events of the job. Has no effect on finished jobs.
        """
        with self._changed:
            self._cancelled.add(job.number)
            self._changed.notify()

    @property
    def slot_use(self) -> SlotUse:
        return SlotUse(self._executor.used_slots, len(self._waiting))

    @property
    def queued_s(self) -> float:
        """Predicted decoder time of all waiting jobs, in seconds."""
        with self._changed:
            return self._waiting.predict_s()

    def check_thread(self) -> None:
        """Raise EngineFailed if the thread of the steps ended without `close`."""
        if not (self._thread.is_alive() or self._is_closing or self._thread.ident is None):
            raise EngineFailed(f"{self._model_id}: the thread of its steps has ended")

    def close(self) -> None:
        """Finish all active and waiting jobs, then stop. Blocks."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        lower_thread_priority()
        while self._wait_for_work():
            self.run_step()

    def _wait_for_work(self) -> bool:
        """Wait until there is a job. Return False if the thread must end instead."""
        with self._changed:
            while not (self._executor.active or self._waiting):
                self._cancelled.clear()
                if self._is_closing:
                    return False
                self._changed.wait()
        return True

    def run_step(self) -> None:
        """Run one step and publish its events.

        A failure that cannot be attributed to one job ends all active jobs.
        """
        with self.health.running():
            try:
                self._step()
            except ServeError as error:
                log.error("a step of %s failed", self._model_id, exc_info=error)
                if isinstance(error, EngineLost):
                    self.health.record_failure(error)
                self._fail(hide_details(error))
            except Exception as error:
                log.error("bug: a step of %s raised", self._model_id, exc_info=error)
                self._fail(hide_details(error))
            self._publish_events()

    def _step(self) -> None:
        # Include the time since the previous step, such as the wait for the GIL.
        started_s = self._ended_s or time.perf_counter()
        active_before = len(self._executor.active)
        self._drop_jobs()
        self._executor.admit()
        settings = self._read_settings()
        prefill = self._executor.prefill(settings)
        prefilled_s = time.perf_counter()
        if prefill.tokens:
            self._publish_events()  # first tokens do not wait for the decode step
        output = self._executor.decode(settings)
        ended_s = time.perf_counter()
        self._ended_s = ended_s if self._executor.active else 0.0
        times = self._forecast.times
        times.record_prefill(prefill.tokens + prefill.cached_tokens, prefilled_s - started_s)
        if output.tokens:
            steps = output.tokens / output.sequences
            times.record_step(
                output.sequences, (ended_s - prefilled_s) / steps, (prefilled_s - started_s) / steps
            )
        # Also record a step that only ended jobs, so that the gauges return to zero.
        if prefill.tokens or output.tokens or len(self._executor.active) != active_before:
            self._record(prefill, output, ended_s - started_s)

    def _record(self, prefill: PrefillOutput, output: StepOutput, elapsed_s: float) -> None:
        self._recorder.record(
            StepRecord(
                model=self._model_id,
                compute=self._decoder.info.compute_type,
                prompt_tokens=prefill.tokens,
                answer_tokens=prefill.first_tokens + output.tokens,
                draft_tokens=output.draft_tokens,
                accepted_draft_tokens=output.accepted_draft_tokens,
                active=len(self._executor.active),
                waiting=len(self._waiting),
                waiting_s=self._waiting.waiting_s,
                step_s=elapsed_s,
            )
        )

    def _drop_jobs(self) -> None:
        """Release cancelled and expired jobs, and waiting jobs that cannot keep their deadline."""
        active = self._executor.active
        with self._changed:
            cancelled, self._cancelled = self._cancelled, set()
            self._waiting.discard(cancelled)
            dropped = self._waiting.drop_late(self._executor.used_slots)
        # Append each event before the next release. If a release fails, the step ends, and only
        # jobs that are still active get an event for the failure.
        events = self._executor.events
        events += [JobEvent(each.job.number, each.error) for each in dropped]
        for number in cancelled & active.keys():
            self._executor.release(active[number])
        for job in [job for job in active.values() if is_expired(job.deadline_s)]:
            error = DeadlineExceeded("the answer took longer than its time limit")
            events.append(JobEvent(job.number, error))
            self._executor.release(job)

    def _next_waiting(self, free_slots: int) -> Job | None:
        with self._changed:
            return self._waiting.take(free_slots)

    def _fail(self, error: ServeError) -> None:
        self._executor.fail_all(error)
        self._ended_s = 0.0
        self._record(NO_PROMPTS, NO_OUTPUT, self.health.running_s())  # no job is active now

    def _publish_events(self) -> None:
        events, self._executor.events = self._executor.events, []
        for number, payload in events:
            finished = payload.finished if isinstance(payload, Chunk) else None
            if finished is not None:
                is_cut = finished.reason is FinishReason.LENGTH
                self._forecast.lengths.record(finished.generated_tokens, is_cut=is_cut)
            if finished is not None or isinstance(payload, ServeError):
                with self._changed:
                    self._waiting.record_end(number)
        if events:
            self._publish(events)
