"""What must come of the examples of mqfs-bridge(1). Of qlobber-fsq there is a folder here, and no process."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from mqfs.bridge.folder import MULTI, Topics
from mqfs.client import connect
from tests.docs.pages import Block
from tests.docs.scene import Scene
from tests.docs.treated import prepared, treated
from tests.support.eventually import eventually

LATER_MS = 1 << 43


def put(folder: Path, topic: str, number: int) -> None:
    name, _ = Topics().name(topic, MULTI, LATER_MS, f"{number:032x}")
    (folder / "messages" / "0" / str(name)).write_bytes(b"\0hello")


def arrives(at: Scene, stream: str) -> None:
    with closing(connect(f"unix!{at.folder}/mqfs.sock")) as client:
        shop = client.group("shop")
        eventually(lambda: stream in shop.streams(), stream)


@prepared("mqfs-bridge.1")
def a_server_and_a_folder(at: Scene) -> None:
    at.serve()
    (at.folder / "fsq" / "messages" / "0").mkdir(parents=True)
    at.type(f"export XDG_STATE_HOME={at.folder}/state")


@treated("mqfs-bridge.1", "mkdir mq/shop")
def both_ways(at: Scene, block: Block) -> None:
    for line in block.lines[:-1]:
        assert at.type(line.typed) == []
    (at.mount / "shop" / "ctl").write_text("replay all\n")
    (at.mount / "shop" / "out").write_text("hello")
    at.typing.begin(block.lines[-1].typed)
    put(at.folder / "fsq", "a.b", 1)
    arrives(at, "a.b")
    eventually(lambda: len(list((at.folder / "fsq/messages/0").iterdir())) == 2, "the file")
    at.typing.interrupt()
    assert at.typing.code == 0


@treated("mqfs-bridge.1", "mqfs bridge fsq --in")
def inwards(at: Scene, block: Block) -> None:
    at.typing.begin(block.text)
    put(at.folder / "fsq", "c/d", 2)
    arrives(at, "c.d")
    at.typing.interrupt()
    assert at.typing.code == 0
