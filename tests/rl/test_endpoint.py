"""The OpenAI-compatible generator against a small server, and `python -m rl eval` from end to end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from rl.byte_tokenizer import ByteTokenizer
from rl.dialogue import Dialogue
from rl.errors import ConfigError
from rl.generator import ContextTooLong, Generation, GeneratorUnavailable, Sampling
from rl.generators.endpoint import EndpointGenerator, EndpointSettings, open_endpoint, to_messages
from tests.rl.endpoint_kit import Answer, Messages, Server, serving

DRAW = Sampling(50)
DIALOGUE = Dialogue(ByteTokenizer(), begins_turns=False)
PROMPT = DIALOGUE.prompt("What is 19 + 23?")


def draw(
    server: Server, sampling: Sampling = DRAW, slept: list[float] | None = None, attempts: int = 3
) -> Generation:
    async def sleep(seconds: float) -> None:
        if slept is not None:
            slept.append(seconds)

    async def body() -> Generation:
        settings = EndpointSettings(server.url, "tiny", attempts=attempts)
        async with aiohttp.ClientSession() as session:
            return await EndpointGenerator(session, settings, sleep).generate(PROMPT, sampling)

    return asyncio.run(body())


def test_a_dialogue_goes_out_as_messages_and_comes_back_as_ids() -> None:
    with serving(lambda messages: Answer("19 + 23 is\n```python\nprint(19 + 23)\n```\nthen")) as server:
        made = draw(server, Sampling(50, stop=DIALOGUE.stops(first=True), temperature=0.2, top_p=0.9))
    (request,) = server.requests
    assert request["path"] == "/v1/chat/completions"
    assert {name: request[name] for name in ("model", "temperature", "top_p", "max_tokens")} == {
        "model": "tiny",
        "temperature": 0.2,
        "top_p": 0.9,
        "max_tokens": 50,
    }
    roles = [message["role"] for message in request["messages"]]
    assert roles[0] == "system"
    assert request["messages"][-1] == {"role": "user", "content": "What is 19 + 23?"}
    text = DIALOGUE.text(made.ids, first=True)
    assert text == "19 + 23 is\n```python\nprint(19 + 23)\n```\n", "cut behind the block"
    assert DIALOGUE.find_code(text) == "print(19 + 23)\n"
    assert np.isnan(made.logprobs).all(), "nothing that could be trained on"
    assert made.finish_reason == "stop"


def test_later_turns_carry_what_was_said_and_shown() -> None:
    said = ByteTokenizer().encode("```python\nprint(1)\n```\n")
    shown = DIALOGUE.observation(np.array(said, np.int32), "Output: 1")
    dialogue = ByteTokenizer().decode([*PROMPT.tolist(), *said, *shown.tolist()])
    assert to_messages(dialogue)[-3:] == [
        {"role": "user", "content": "What is 19 + 23?"},
        {"role": "assistant", "content": "```python\nprint(1)\n```\n"},
        {"role": "user", "content": "Output: 1"},
    ]


@pytest.mark.parametrize(
    ("answer", "finish", "text"),
    [
        (Answer("4", finish_reason="length"), "length", "4"),
        (Answer("42"), "stop", "42"),
        (Answer(None), "stop", ""),
    ],
)
def test_how_a_turn_ends(answer: Answer, finish: str, text: str) -> None:
    with serving(lambda messages: answer) as server:
        made = draw(server)
    assert (made.finish_reason, DIALOGUE.text(made.ids, first=True)) == (finish, text)


def test_what_may_pass_is_tried_again_after_the_time_the_server_asks() -> None:
    answers = iter([Answer(status=429, headers={"Retry-After": "7"}), Answer(raw="<html>"), Answer("42")])
    slept: list[float] = []
    with serving(lambda messages: next(answers)) as server:
        assert DIALOGUE.text(draw(server, slept=slept).ids, first=True) == "42"
    assert slept[0] == 7.0
    assert len(slept) == 2
    assert len(server.requests) == 3


def test_a_request_that_fails_for_good_is_no_answer() -> None:
    with serving(lambda messages: Answer(status=503, raw="busy")) as server:
        with pytest.raises(GeneratorUnavailable, match="503: busy, 3 times"):
            draw(server)
    assert len(server.requests) == 3


def test_a_dialogue_that_is_too_long_is_told_from_other_faults() -> None:
    raw = json.dumps({"error": {"message": "This model's maximum context length is 4096 tokens."}})
    with serving(lambda messages: Answer(status=400, raw=raw)) as server:
        with pytest.raises(ContextTooLong, match="4096"):
            draw(server)
    assert len(server.requests) == 1


def test_the_newer_name_of_the_limit_is_learnt() -> None:
    answers = iter([Answer(status=400, raw="use 'max_completion_tokens' instead"), Answer("42")])
    with serving(lambda messages: next(answers)) as server:
        draw(server)
    assert "max_tokens" not in server.requests[1]
    assert server.requests[1]["max_completion_tokens"] == 50


def opening(settings: EndpointSettings) -> None:
    async def body() -> None:
        async with open_endpoint(settings):
            pass

    asyncio.run(body())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(status=401, raw="who?"), "401: who\\?; set OPENAI_API_KEY"),
        (Answer(status=404, raw="no such model"), "404: no such model; check --endpoint and --model"),
        (Answer(status=503, raw="busy"), "does not answer: .* 503: busy"),
    ],
)
def test_an_endpoint_that_refuses_is_known_before_the_first_attempt(answer: Answer, message: str) -> None:
    with serving(lambda messages: answer) as server:
        with pytest.raises(ConfigError, match=message):
            opening(EndpointSettings(server.url, "tiny", "secret"))
    assert server.keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("url", "message"), [("http://127.0.0.1:1/v1", "does not answer"), ("here", "is no URL|does not answer")]
)
def test_an_endpoint_that_is_not_there_is_named(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opening(EndpointSettings(url, "tiny"))


def adds_and_fails_by_turns() -> Callable[[Messages], Answer]:
    """Solves every second of the attempts at a sum."""
    asked: dict[str, int] = {}

    def reply(messages: Messages) -> Answer:
        last = messages[-1]["content"]
        if said := re.fullmatch(r"Output: (\S+)", last):
            return Answer(said[1])
        sums = re.findall(r"[0-9][0-9+ ]*[0-9]", last)
        asked[last] = asked.get(last, 0) + 1
        right = asked[last] % 2 and sums
        return Answer(f"I use Python.\n```python\nprint({sums[0] if right else 0})\n```")

    return reply


def command(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    config = tmp_path / "eval.toml"
    config.write_text('[sandboxes]\nbackend = "fake"\nwarm = 2\n[episode]\nturn_tokens = 200\n')
    words = [sys.executable, "-m", "rl", "eval", str(config), "--runs-dir", str(tmp_path), *arguments]
    surroundings = {k: v for k, v in os.environ.items() if k not in ("SANDBOXD_ADDRESS", "OPENAI_API_KEY")}
    return {"args": words, "env": surroundings, "text": True}


def evaluate(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**command(tmp_path, *arguments), capture_output=True, timeout=100)


def test_eval_from_end_to_end(tmp_path: Path) -> None:
    with serving(adds_and_fails_by_turns()) as server:
        arguments = ("--task", "sums", "--tasks", "2", "--samples", "4", "--k", "1,4", "--top-p", "0.9")
        done = evaluate(tmp_path, *arguments, "--endpoint", server.url, "--model", "tiny")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "eval" / "eval.json").read_text())
    count = 2 * 4 * (len(result["pass_at_k"]) - 1)
    assert (result["attempts"], result["scored"], result["unscored"]) == (count, count, {})
    assert result["pass_at_k"]["all"]["1"]["value"] == 0.5
    assert result["pass_at_k"]["all"]["4"]["value"] == 1.0
    assert result["pass_at_k"]["sums/0"]["1"]["tasks"] == 2
    assert {request["top_p"] for request in server.requests[1:]} == {0.9}
    assert result["stop_reasons"] == {"completed": count}
    assert all(sorted(task["rewards"]) == [0.0, 0.0, 1.0, 1.0] for task in result["tasks"])
    assert "50.0%" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "sums", "--k", "5"), "--k 5: each k must lie in 1 to --samples 1"),
        (("--task", "sums", "--k", "one"), "--k one: give whole numbers with commas, such as 1,5"),
        (("--task", "sums", "--endpoint", "http://h/v1"), "--endpoint needs --model NAME"),
        (("--task", "nothing"), "no task family 'nothing': there are sums"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line_each(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = evaluate(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_ctrl_c_ends_an_evaluation_that_waits_for_its_endpoint(tmp_path: Path) -> None:
    asked, let_go = threading.Event(), threading.Event()

    def reply(messages: Messages) -> Answer:
        if messages[-1]["content"] != "Hi":
            asked.set()
            let_go.wait(50)
        return Answer("42")

    with serving(reply) as server:
        arguments = ("--task", "sums", "--endpoint", server.url, "--model", "tiny")
        program = command(tmp_path, *arguments)
        with subprocess.Popen(**program, stderr=subprocess.PIPE, start_new_session=True) as process:
            assert asked.wait(40)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=30)
        let_go.set()
    assert process.returncode == 130
    assert told.splitlines()[-1].endswith("stopping")
    assert not (tmp_path / "eval" / "eval.json").exists()
