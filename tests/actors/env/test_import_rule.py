from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gymnasium.envs.registration import EnvSpec

from envbus.actors.env.actor import EnvActor
from envbus.actors.env.construction import construct
from envbus.actors.env.import_rule import ImportRule
from envbus.actors.env.source import EntryPoint, EnvSource, GymId, make, to_plain
from envbus.actors.protocol import Build, Call, Exec, SetAttr
from envbus.bus.errors import ConfigError
from envbus.bus.wire.messages import Tree

MINE = "tests.actors.sims_of_mine"


@pytest.mark.parametrize("allowed", [MINE, f"{MINE}.", "tests", "tests."])
@pytest.mark.parametrize("path", ["Walker", "make_walker", "Maker.by_class", "Maker.statically"])
def test_classes_and_functions_of_an_allowed_module_are_called(allowed: str, path: str) -> None:
    env = make(EntryPoint(f"{MINE}:{path}"), ImportRule([allowed]))
    assert type(env).__name__ == "Walker"


@pytest.mark.parametrize("env_id", ["CartPole-v1", "CartPole"])
@pytest.mark.filterwarnings("ignore:.*latest versioned")
def test_ids_that_are_registered_are_made_without_being_allowed(env_id: str) -> None:
    assert make(GymId(env_id), ImportRule()).spec is not None


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (EntryPoint("subprocess:Popen"), "--allow subprocess"),
        (EntryPoint("subprocess:Popen", modules=(MINE,)), "--allow subprocess"),
        (EntryPoint(f"{MINE}:Walker", modules=("this",)), "--allow this"),
        (EntryPoint(f"{MINE}_of_others:make"), f"--allow {MINE}_of_others"),
        (EntryPoint(f"{MINE}:subprocess.Popen"), "--allow subprocess"),
        (EntryPoint(f"{MINE}:Popen"), "--allow subprocess"),
        (EntryPoint(f"{MINE}:Maker.popen"), "--allow subprocess"),
        (EntryPoint(f"{MINE}:partial_popen"), "no class or function"),
        (EntryPoint(f"{MINE}:ready.by_class"), "no class or function"),
        (EntryPoint(f"{MINE}:make_walker.__globals__.get"), "no class or function"),
        (EntryPoint(f"{MINE}:make_walker.__class__"), "--allow builtins"),
        (EntryPoint(f"{MINE}:Walker.__subclasses__"), "no class or function"),
        (EntryPoint(f"{MINE}:Walker.__base__.__base__"), "--allow envbus.actors.testing"),
        (EntryPoint("CartPole:v1"), "--allow CartPole"),
        (GymId("this:CartPole-v1"), "--allow this"),
        (GymId("antigravity:a/CartPole-v1"), "--allow antigravity"),
        (GymId("CartPole-v1", modules=("this",)), "--allow this"),
        (GymId("GymV26Environment-v0", {"env_id": "this:X-v0"}), "env_id"),
        (GymId("GymV21Environment", {"env_id": "this:X-v0"}), "env_id"),
        (EntryPoint(f"{MINE}:GymV26Environment-v0", {"env_id": "this:X-v0"}), "env_id"),
        (list, "does not call"),
    ],
)
def test_everything_else_is_refused_by_the_flag_that_would_allow_it(
    source: EnvSource, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PermissionError, match=named):
        make(source, ImportRule([MINE]))
    assert capsys.readouterr().out == ""  # `this` was not imported: it prints a poem


def test_specs_of_others_are_not_registered() -> None:
    spec = EnvSpec("Mine-v0", entry_point="subprocess:Popen")
    request = Build(
        sources=Tree([to_plain(GymId("Mine-v0"))]), autoreset_mode="NextStep", specs=Tree([spec])
    )
    _, built = construct(request, rule=ImportRule())
    assert "registers no env specs" in built.errors[0].message


@pytest.mark.parametrize("name", ["", ".", "a b", "my_sims:make", "..", "my-sims", "*"])
def test_what_is_no_module_cannot_be_allowed(name: str) -> None:
    with pytest.raises(ConfigError, match="--allow my_sims"):
        ImportRule([name])


def test_by_name_only_what_the_env_itself_offers_is_reached(tmp_path: Path) -> None:
    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        return actor.call(Call(name=name, args=Tree(args), kwargs=Tree(kwargs))).values.value

    def set_attr(name: str, value: object) -> None:
        actor.set_attr(SetAttr(name=name, values=Tree([value])))

    actor = EnvActor(rule=ImportRule())
    sources = Tree([to_plain(GymId("CartPole-v1"))])
    actor.build(Build(sources=sources, autoreset_mode="NextStep"))
    assert call("gravity") == call("unwrapped.gravity") == [9.8]
    set_attr("gravity", 1.6)
    assert call("get_wrapper_attr", "gravity") == [1.6]
    canary = tmp_path / "canary"
    for name in ("spec.entry_point", "unwrapped.spec.entry_point", "__class__", "_envs"):
        with pytest.raises(PermissionError, match="without dots"):
            set_attr(name, "subprocess:Popen")
    for name in ("spec.make", "unwrapped.spec.make", "__init__", "step.__globals__.get", "_x", ""):
        with pytest.raises(PermissionError, match="without dots"):
            call(name, args=["touch", str(canary)])
    for taker in ("get_wrapper_attr", "unwrapped.get_wrapper_attr", "set_wrapper_attr"):
        with pytest.raises(PermissionError, match="no '_np_random_seed' for others"):
            call(taker, "_np_random_seed", 1)
        with pytest.raises(PermissionError, match="no '_np_random_seed' for others"):
            actor.call(Call(name=taker, args=Tree(()), kwargs=Tree({"name": "_np_random_seed"})))
    for taker in ("call", "get_attr", "set_attr"):
        with pytest.raises(PermissionError, match="no '__class__' for others"):
            call(taker, "__class__", 1)
    assert not canary.exists()
    assert Exec not in actor.handlers
    actor.close()
