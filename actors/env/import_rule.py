"""What an actor that joins from elsewhere may import, make and call for whoever asks it.

Pure: nothing is imported here; `source.py` asks before it imports, and again before it calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType

from envbus.bus.errors import ConfigError

__all__ = ["ImportRule"]

#: Gymnasium ids that make whatever old Gym id their `env_id=` names, which may name a module.
_MAKERS_OF_OTHERS = frozenset({"GymV21Environment", "GymV26Environment"})
#: Methods of Gymnasium's envs and vector envs that reach the attribute whose name they are called
#: with.
_TAKERS_OF_NAMES = frozenset(
    {"get_wrapper_attr", "has_wrapper_attr", "set_wrapper_attr", "call", "get_attr", "set_attr"}
)


class ImportRule:
    """The modules whose classes and functions may be called, all below them included.

    Args:
        modules: `"my_sims"` or `"my_sims."`, say; neither allows `my_sims_of_others`.

    Raises:
        ConfigError: One is no name of a module.
    """

    def __init__(self, modules: Iterable[str] = ()) -> None:
        if isinstance(modules, str):
            modules = [modules]
        self._modules = [module.removesuffix(".") for module in modules]
        for module in self._modules:
            if not all(part.isidentifier() for part in module.split(".")):
                raise ConfigError(
                    f"{module!r} is no module that can be allowed; name one, as in --allow my_sims"
                )

    def check_id(self, env_id: str) -> None:
        """Refuse a Gymnasium id whose making imports what is not allowed.

        Raises:
            PermissionError: It names a module, or a maker of old Gym's envs.
        """
        module, colon, name = env_id.rpartition(":")
        if colon:
            self.check_module(module)
        if name.rpartition("/")[2].partition("-v")[0] in _MAKERS_OF_OTHERS:
            raise PermissionError(
                f"{env_id!r} makes whatever its env_id= names, so that a remote actor does not "
                "make it; wrap it in a function of a module of yours, and --allow that"
            )

    def check_module(self, module: object) -> None:
        """Refuse a module before it is imported.

        Raises:
            PermissionError: It is not allowed.
        """
        if not self._covers(module):
            raise PermissionError(
                f"this remote actor imports nothing of {module!r}; if its runners may, start it "
                f"with --allow {module} (serve_remote: allow=[{module!r}])"
            )

    def check_found(self, path: str, found: object) -> None:
        """Refuse what was found at an import path, unless an allowed module has defined it.

        Args:
            path: For people.
            found: A module, class, function or class method passes if it is of an allowed module;
                what a module has only imported does not, nor any other object.

        Raises:
            PermissionError: It is something else.
        """
        if isinstance(found, ModuleType):
            home: object = found.__name__
        elif isinstance(found, type | FunctionType):
            home = found.__module__
        elif isinstance(found, MethodType) and isinstance(found.__self__, type):
            home = found.__func__.__module__
        else:
            raise PermissionError(
                f"{path!r} is no class or function but a {type(found).__qualname__}, which a "
                "remote actor does not call"
            )
        if not self._covers(home):
            raise PermissionError(
                f"{path!r} is defined in {home!r}, of which this remote actor calls nothing; if "
                f"its runners may, start it with --allow {home} (serve_remote: allow=[{home!r}])"
            )

    def check_attribute(self, name: str) -> None:
        """Refuse a name by which more than an attribute or a method of the env is reached.

        Raises:
            PermissionError: It has dots, save behind "unwrapped", or begins with "_".
        """
        own = name.removeprefix("unwrapped.")
        if not own.isidentifier() or own.startswith("_"):
            raise PermissionError(
                f"a remote actor's envs have no {name!r} for others: only public attributes and "
                "methods of the env itself, without dots"
            )

    def check_call(self, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Refuse what a call by name would reach, also by a method that itself takes a name.

        Raises:
            PermissionError: As `check_attribute`.
        """
        self.check_attribute(name)
        if name.removeprefix("unwrapped.") in _TAKERS_OF_NAMES:
            for meant in (*args[:1], *(kwargs[key] for key in kwargs if key == "name")):
                if isinstance(meant, str):  # an env's own method of that name may take a number
                    self.check_attribute(meant)

    def _covers(self, module: object) -> bool:
        return isinstance(module, str) and any(
            module == known or module.startswith(f"{known}.") for known in self._modules
        )
