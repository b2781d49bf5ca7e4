from __future__ import annotations

from argparse import Namespace
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from benchmarks.generation.streams import OVER_HTTP
from benchmarks.generation.systems import SystemFactory
from tests.support.benchmark_fakes import FakeAnswer, FakeServer

NOTHING = cast(Any, None)


@pytest.mark.parametrize(("version", "same_model"), [("ours", {OVER_HTTP}), ("other", set())])
def test_a_server_must_give_our_answers_only_at_our_version(
    version: str, same_model: set[str]
) -> None:
    facts = orjson.dumps({"id": "org/model", "version": version})
    with FakeServer(lambda n, request: FakeAnswer(body=facts)).in_thread() as server:
        factory = SystemFactory(
            arguments=Namespace(url=server.target.url),
            model=cast(
                Any, SimpleNamespace(manifest=SimpleNamespace(id="org/model", version="ours"))
            ),
            checkpoint=NOTHING,
            runner=NOTHING,
            stack=ExitStack(),
            kv_slots=1,
            threads=1,
            context=64,
        )
        factory.served()
    assert factory.same_model == same_model
    assert len(factory.notes) == 1 - len(same_model)
