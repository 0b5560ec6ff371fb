"""`mqfs mcp` with the client of the protocol's own package: work, looks, limits, failures, ends of both sides."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from subprocess import PIPE
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

from mqfs.cli import mcp
from tests.support import ROOT
from tests.support.eventually import HANG_S
from tests.support.full_log import FILLER, FULL, fill_log
from tests.support.server import COMMAND, Server, environment, short_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with short_folder() as folder, Server.at(folder) as server:
        yield server


class Agent:
    """A session with a server of the protocol."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def __call__(self, tool: str, **arguments: Any) -> Any:
        """What a tool answers. Raises ValueError with the text of an error."""
        answer = await self.client.call_tool(tool, arguments)
        text = "".join(part.text for part in answer.content)
        if answer.is_error:
            raise ValueError(text)
        content = answer.structured_content
        return content["result"] if content is not None and [*content] == ["result"] else content


@asynccontextmanager
async def agent(server: Server | str, group: str, *words: str) -> AsyncIterator[Agent]:
    """`server`: it, or addresses of which one serves."""
    address = server if isinstance(server, str) else server.address
    command = ["-m", "mqfs", "mcp", "--at", address, "--group", group, *words]
    parameters = StdioServerParameters(command=sys.executable, args=command, cwd=str(ROOT), env=environment())
    async with Client(parameters) as client:
        yield Agent(client)


def test_agents_work(server: Server) -> None:
    async def work() -> None:
        async with agent(server, "work") as one, agent(server, "work") as two:
            assert await one("wait", stream="inbox/two", seconds=0) is None
            sent = await one("send", stream="inbox/two", body="grüß", headers={"from": "one"}, id="1")
            claim = await two("wait", stream="inbox/two")
            assert claim["claim"] == f"inbox/two:{sent['sequence']}"
            assert (claim["body"], claim["headers"]["from"], claim["deliveries"]) == ("grüß", "one", 1)
            await two("nack", claim=claim["claim"], delay_s=0.01)
            again = await two("wait", stream="inbox/two")
            assert again["deliveries"] == 2
            with pytest.raises(ValueError, match="unknown claim 'nothing'"):
                await two("ack", claim="nothing")
            await two("ack", claim=again["claim"])
            assert await one("list") == [{"stream": "inbox/two", "messages": 1, "waiting": 0}]
            await one("send", stream="inbox/two", body="bad")
            await two("dead", claim=(await two("wait", stream="inbox/two"))["claim"], reason="not understood")
            for [dead] in (await one("history", pattern="dead"), await one("tail", stream="dead")):
                assert (dead["body"], dead["headers"]["reason"]) == ("bad", "not understood")
            assert [m["body"] for m in await one("tail", stream="inbox/two", count=2)] == ["grüß", "bad"]
            resource = await one.client.read_resource("mqfs://stream/dead")
            assert [m["body"] for m in json.loads(resource.contents[0].text)] == ["bad"]

    anyio.run(work)


def test_a_claim_that_cannot_be_a_dead_letter_is_still_held(server: Server) -> None:
    with server.connect() as client:
        group = client.group("full", create=True, ctl=["replay all", *FULL, "backoff 1ms 1ms"])

        async def work() -> None:
            async with agent(server, "full") as one:
                await one("send", stream="s", body="x")
                claim = (await one("wait", stream="s"))["claim"]
                fill_log(group)
                with pytest.raises(ValueError, match="not moved to the dead letters"):
                    await one("dead", claim=claim, reason="bad")
                await one("nack", claim=claim)
                assert (await one("wait", stream="s"))["deliveries"] == 2
                group.remove(FILLER)
                await one("dead", claim=claim, reason="bad")
                assert await one("wait", stream="s", seconds=0) is None

        anyio.run(work)


def test_a_waiting_agent_is_woken_and_an_ended_one_loses_its_claims(server: Server) -> None:
    async def work() -> None:
        async with agent(server, "ends") as two:
            async with agent(server, "ends") as one, anyio.create_task_group() as tasks:
                answers = []

                async def wait() -> None:
                    answers.append(await one("wait", stream="s", seconds=60))

                tasks.start_soon(wait)
                await two("send", stream="s", body="x")
            assert answers[0]["body"] == "x"
            assert (await two("wait", stream="s", seconds=60))["body"] == "x"

    anyio.run(work)


@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
def test_each_of_the_waits_of_one_agent_gets_a_message(server: Server, known: bool) -> None:
    """Clients call tools in parallel. `known`: the agent has waited on the stream before."""
    group, bodies = f"parallel-{known}", [*"abcde"]

    async def work() -> None:
        async with agent(server, group) as one, agent(server, group) as two:
            if known:
                assert await one("wait", stream="s", seconds=0) is None
            answers: list[Any] = []

            async def wait(seconds: float) -> None:
                answers.append(await one("wait", stream="s", seconds=seconds))

            with anyio.fail_after(HANG_S):
                async with anyio.create_task_group() as tasks:
                    for _ in bodies:
                        tasks.start_soon(wait, mcp.MOST_S)
                    await two("wait", stream="another", seconds=0.1)
                    for body in bodies:
                        await two("send", stream="s", body=body)
                assert sorted(answer["body"] for answer in answers) == bodies
                for answer in answers:
                    await one("ack", claim=answer["claim"])
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(wait, mcp.MOST_S)
                    await wait(0.1)  # its time is over, though the other one waits on
                    assert answers[-1] is None
                    await two("send", stream="s", body="last")
                assert answers[-1]["body"] == "last"

    anyio.run(work)


def test_no_more_streams_are_waited_on_by_calls_in_parallel(server: Server) -> None:
    async def work() -> None:
        async with agent(server, "many") as one:
            refused: list[str] = []

            async def wait(number: int) -> None:
                try:
                    await one("wait", stream=f"s{number}", seconds=0)
                except ValueError as error:
                    refused.append(str(error))

            async with anyio.create_task_group() as tasks:
                for number in range(mcp.OPEN + 6):
                    tasks.start_soon(wait, number)
            assert len(refused) == 6
            assert all("64 streams are waited on" in text for text in refused)

    anyio.run(work)


@pytest.mark.parametrize("waiting", [True, False], ids=["while it waits", "between two waits"])
@pytest.mark.parametrize("what", ["consumer", "stream"])
def test_an_agent_works_on_after_what_it_waits_on_was_removed(server: Server, what: str, waiting: bool) -> None:
    path = f"removed-{what}-{waiting}"

    async def work() -> None:
        with server.connect() as client:
            group = client.group(path, create=True)
            async with agent(server, path) as one:
                assert await one("wait", stream="s", seconds=0) is None
                answers: list[Any] = []

                async def wait() -> None:
                    answers.append(await one("wait", stream="s", seconds=mcp.MOST_S))

                with anyio.fail_after(HANG_S):
                    async with anyio.create_task_group() as tasks:
                        if waiting:
                            tasks.start_soon(wait)
                            while group.stats().consumers["s"].parked == 0:
                                await anyio.sleep(0.01)
                        group.remove_consumer("s") if what == "consumer" else group.remove("s")
                        if not waiting:
                            tasks.start_soon(wait)
                        while not (found := group.stats().consumers.get("s")) or found.parked == 0:
                            await anyio.sleep(0.01)
                        await one("send", stream="s", body="x")
                assert answers[0]["body"] == "x"
                await one("ack", claim=answers[0]["claim"])

    anyio.run(work)


def test_tools_that_only_look(server: Server) -> None:
    async def work() -> None:
        async with agent(server, "looks", "--read-only") as one:
            assert [tool.name for tool in (await one.client.list_tools()).tools] == ["list", "tail", "history"]
            with pytest.raises(ValueError, match="stream 'none'"):
                await one("tail", stream="none")

    anyio.run(work)


def test_the_page_names_each_argument_with_its_default(server: Server) -> None:
    async def work() -> None:
        async with agent(server, "page") as one:
            tools = (await one.client.list_tools()).tools
        page = (ROOT / "docs" / "howto" / "agents.md").read_text()
        rows = [row.split("|") for row in page.splitlines() if row.startswith("| `")]
        assert {row[1].strip(): row[2].strip() for row in rows} == {
            f"`{tool.name}`": ", ".join(
                typed(name, argument) for name, argument in tool.input_schema["properties"].items()
            )
            for tool in tools
        }

    def typed(name: str, argument: dict[str, Any]) -> str:
        return f"`{name}={json.dumps(argument['default'])}`" if "default" in argument else f"`{name}`"

    anyio.run(work)


def test_limits_and_wrong_arguments(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with agent(server, "limits") as one:
            await one("send", stream="big", body="x" * (mcp.BODY_BYTES + 1))
            [shown] = await one("tail", stream="big", count=1)
            assert (len(shown["body"]), shown["bytes"]) == (mcp.BODY_BYTES, mcp.BODY_BYTES + 1)
            assert len((await one("tail", stream="big", count=100))[0]["body"]) == mcp.BODY_BYTES // mcp.MESSAGES
            for number in range(mcp.OPEN):
                await one("wait", stream=f"s{number}", seconds=0)
            with pytest.raises(ValueError, match="64 streams are waited on"):
                await one("wait", stream="one more", seconds=0)
            with pytest.raises(ValueError, match="pattern"):
                await one("history", pattern="a*b")
            with pytest.raises(ValueError, match="header"):
                await one("send", stream="s", body="", headers={"sender": "me"})
            for tool, wrong, text in (
                ("send", {"stream": "", "body": "x"}, "stream '': no name"),
                ("wait", {"stream": ""}, "stream '': no name"),
                ("send", {"stream": "s", "body": "ü" * 500_001}, "body of 1000002 bytes (expected at most 1000000"),
                ("wait", {"stream": "s", "seconds": 4_000}, "seconds 4000.0 (expected 0 to 3600)"),
                ("tail", {"stream": "big", "count": -1}, "count -1 (expected 1 to 100)"),
                ("history", {"count": 101}, "count 101 (expected 1 to 100)"),
                ("history", {"after": -1}, "after -1 (expected 0 to "),
            ):
                with pytest.raises(ValueError, match=re.escape(text)):
                    await one(tool, **wrong)

    anyio.run(work)


def test_a_long_body_is_read_in_parts(server: Server) -> None:
    """No character is cut, also where the body is no text."""

    async def work() -> None:
        with server.connect() as client:
            group = client.group("long", create=True, ctl=["replay all"])
            for body in (("x" + "ü" * 100_000).encode(), b"\xff" * 70_000):
                group.publish("s", body)
                async with agent(server, "long") as one:
                    claim = await one("wait", stream="s")
                    assert claim["bytes"] == len(body)
                    text, start = claim["body"], claim["next"]
                    while start is not None:
                        part = await one("read", claim=claim["claim"], start=start)
                        text, start = text + part["body"], part["next"]
                    assert text == body.decode(errors="replace")
                    with pytest.raises(ValueError, match=r"start 10000000 \(expected 0 to "):
                        await one("read", claim=claim["claim"], start=10_000_000)
                    await one("ack", claim=claim["claim"])

    anyio.run(work)


def test_a_claim_outlives_a_wrong_argument(server: Server) -> None:
    async def work() -> None:
        async with agent(server, "wrong") as one:
            await one("send", stream="s", body="x")
            claim = (await one("wait", stream="s"))["claim"]
            for delay_s in (-1, 1e300):
                with pytest.raises(ValueError, match="invalid duration"):
                    await one("nack", claim=claim, delay_s=delay_s)
            await one("ack", claim=claim)
            assert await one("list") == [{"stream": "s", "messages": 1, "waiting": 0}]

    anyio.run(work)


def test_an_answer_has_a_bound(server: Server) -> None:
    async def work() -> None:
        async with agent(server, "bound") as one:
            for _ in range(5):
                await one("send", stream="s", body="x" * mcp.BODY_BYTES)
            for looks in (await one("tail", stream="s", count=5), await one("history", count=5)):
                assert sum(len(m["body"]) for m in looks) <= mcp.BODY_BYTES
                assert [m["bytes"] for m in looks] == [mcp.BODY_BYTES] * 5

    anyio.run(work)


def test_a_server_that_is_killed_is_waited_for() -> None:
    async def work(server: Server) -> None:
        async with agent(server, "g") as one:
            await one("send", stream="s", body="kept")
            await anyio.to_thread.run_sync(server.restart, signal.SIGKILL)
            assert (await one("wait", stream="s", seconds=60))["body"] == "kept"

    with short_folder() as folder, Server.at(folder) as server:
        anyio.run(work, server)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, None], ids=["INT", "TERM", "HUP", "pipe"]
)
def test_claims_are_released_however_it_ends(server: Server, number: int | None) -> None:
    """Uncounted, and at once, though its input stays open. None: its output cannot be written."""

    def send(**words: Any) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps({"jsonrpc": "2.0", **words}) + "\n")
        process.stdin.flush()

    command = [*COMMAND, "mcp", "--at", server.address, "--group", f"end-{number}"]
    with server.connect() as client, subprocess.Popen(
        command, env=environment(), text=True, stdin=PIPE, stdout=PIPE, stderr=PIPE
    ) as process:  # fmt: skip
        group = client.group(f"end-{number}", create=True, ctl=["replay all"])
        group.publish("s", "x")
        assert process.stdout is not None
        assert process.stderr is not None
        about = {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        send(id=1, method="initialize", params=about)
        process.stdout.readline()
        send(method="notifications/initialized")
        send(id=2, method="tools/call", params={"name": "wait", "arguments": {"stream": "s"}})
        assert "s:1" in process.stdout.readline()
        if number is None:
            process.stdout.close()
            with suppress(BrokenPipeError), process.stdin:
                while True:  # it ends by the input that it gets after the answer which it cannot write
                    send(id=3, method="tools/list")
        else:
            process.send_signal(number)
        try:
            assert (process.wait(HANG_S), process.stderr.read()) == (-number if number else 1, "")
        finally:
            process.kill()
        claims = group.consume("s")
        assert claims.get(HANG_S).deliveries == 1
