"""Grammars in a generator replica: trials, fair turns and memory."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest

from deployments.errors import (
    InvalidField,
    Overloaded,
)
from deployments.generation.grammar import Constraint, GrammarCompiler
from deployments.generation.grammar_trials import FULL, GrammarTrials, Trial, TrialLimits
from deployments.messages import (
    Completion,
    FinishReason,
    Grammar,
    SamplingParams,
    Started,
)
from deployments.replicas import generator
from tests.support.decoder_artifacts import DECODER
from tests.support.fakes import TIMEOUT_S, wait_until
from tests.support.generator_replicas import OTHER, call, complete, replica


async def test_grammar_constrains_the_text(store, refs) -> None:
    grammar = Grammar("regex", "(yes|no), [0-9]{3}")
    async with replica(store) as running:
        completion = await complete(
            running,
            call(
                refs[DECODER], grammar=grammar, sampling=SamplingParams(seed=3), max_new_tokens=40
            ),
        )
    word, digits = completion.text.split(", ")
    assert word in {"yes", "no"}
    assert len(digits) == 3
    assert digits.isdecimal()
    assert completion.finished.reason is FinishReason.END


async def test_grammar_compilation_does_not_block_other_calls(
    store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, done = threading.Event(), threading.Event()
    compiled = GrammarCompiler.compile

    def compile_slowly(
        compiler: GrammarCompiler, grammar: Grammar, limits: TrialLimits
    ) -> Constraint:
        compiling.set()
        assert done.wait(TIMEOUT_S)
        return compiled(compiler, grammar, limits)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
    request = call(refs[DECODER], grammar=Grammar("regex", "yes|no"))
    async with replica(store) as running:
        slow = asyncio.create_task(complete(running, request))
        assert await asyncio.to_thread(compiling.wait, TIMEOUT_S)
        await asyncio.wait_for(complete(running, call(refs[DECODER])), TIMEOUT_S)
        assert not slow.done()
        done.set()
        assert (await slow).text in {"yes", "no"}


async def test_grammars_of_one_client_do_not_delay_another(
    store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_start = threading.Event()
    compiled: list[str] = []
    compile_grammar = GrammarCompiler.compile

    def compile_in_turn(
        compiler: GrammarCompiler, grammar: Grammar, limits: TrialLimits
    ) -> Constraint:
        assert may_start.wait(TIMEOUT_S)
        compiled.append(grammar.value)
        return compile_grammar(compiler, grammar, limits)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_in_turn)
    monkeypatch.setattr(generator, "QUICK_GRAMMAR_THREADS", 1)  # two could start in any order
    loud = [
        call(refs[DECODER], grammar=Grammar("regex", f"loud{i}"))._replace(client="loud")
        for i in range(6)
    ]
    quiet = call(refs[DECODER], grammar=Grammar("regex", "quiet"))._replace(client="quiet")
    async with replica(store) as running:
        tasks = [asyncio.create_task(running.complete(one)) for one in (*loud, quiet)]
        await wait_until(lambda: len(running._quick_grammars._queue) == 6)  # one runs
        may_start.set()
        outcomes = await asyncio.gather(*tasks)
    assert all(isinstance(outcome, Completion) for outcome in outcomes)
    assert compiled[0] == "loud0"
    assert "quiet" in compiled[1:3]


async def test_costly_grammars_are_rejected_and_others_go_on(
    store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_try, run = threading.Event(), GrammarTrials.run

    def run_long_trials_later(
        trials: GrammarTrials, source: str, limits: TrialLimits
    ) -> Trial | None:
        if limits == FULL:
            assert may_try.wait(TIMEOUT_S)
        return run(trials, source, limits)

    monkeypatch.setattr(GrammarTrials, "run", run_long_trials_later)
    costly = [
        call(refs[DECODER], grammar=Grammar("json_schema", f'{{"multipleOf": {number}}}'))
        for number in (9999991, 9999973, 9999971)
    ]
    simple = call(refs[DECODER], grammar=Grammar("regex", "(yes|no)"))
    async with replica(store) as running:
        await complete(running, simple)
        refused = [asyncio.create_task(running.complete(one)) for one in costly]
        assert (await complete(running, simple)).text in ("yes", "no")
        assert (await complete(running, call(refs[DECODER], grammar=OTHER))).text in ("a", "b")
        assert not any(task.done() for task in refused)
        may_try.set()
        for outcome in await asyncio.gather(*refused):
            assert isinstance(outcome, InvalidField)
            assert outcome.field == "grammar"
            assert "takes more than 1 s or 128 MB" in outcome.message
        again = await running.complete(costly[0])
        assert isinstance(again, InvalidField), "remembered"


async def test_compiled_grammars_share_a_budget(
    store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replicas.generator.MAX_GRAMMAR_BYTES", 1)
    async with replica(store) as running:
        outcome = await running.complete(call(refs[DECODER], grammar=OTHER))
        assert isinstance(outcome, Overloaded)
        assert "bytes of compiled grammars" in outcome.message
        await complete(running, call(refs[DECODER]))
        monkeypatch.undo()
        await complete(running, call(refs[DECODER], grammar=OTHER))
        assert running._grammar_bytes.used == 0


async def test_grammars_of_one_client_leave_memory_to_others(
    store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = call(refs[DECODER], grammar=OTHER)
    loud, quiet = (request._replace(client=name) for name in ("loud", "quiet"))
    async with replica(store) as running, aclosing(running.stream(loud)) as stream:
        assert isinstance(await anext(stream), Started)
        grammar_bytes = running._grammar_bytes.used
        monkeypatch.setattr(generator, "MAX_GRAMMAR_BYTES", 3 * grammar_bytes)
        outcome = await running.complete(loud)
        assert isinstance(outcome, Overloaded)
        assert "bytes of compiled grammars of this client" in outcome.message
        await complete(running, quiet)
