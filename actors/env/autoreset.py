"""The three autoreset modes of Gymnasium, decided in one place.

Pure: knows slots and the ends of their episodes, no env. Whoever steps envs asks here when to
reset them.

| mode | after the end of an episode |
|---|---|
| NEXT_STEP | the next step ignores its action and resets: reward 0, flags False |
| SAME_STEP | the same step resets; `final_obs` and `final_info` go into the info |
| DISABLED | nothing, until somebody resets the slot |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium.vector import AutoresetMode

__all__ = ["Autoreset", "AutoresetMode", "same_step_info"]


class Autoreset:
    """When the slots of one actor are reset without being asked.

    Attributes:
        mode: Gymnasium's mode.
        waiting: One bool per slot: its next step is a reset. To be read, not written.
    """

    def __init__(self, mode: AutoresetMode, num_slots: int) -> None:
        self.mode = mode
        self.waiting = [False] * num_slots

    def on_end(self, slot: int) -> bool:
        """An episode was terminated or truncated. Return whether to reset within this step."""
        if self.mode is AutoresetMode.NEXT_STEP:
            self.waiting[slot] = True
        return self.mode is AutoresetMode.SAME_STEP

    def on_reset(self, slot: int) -> None:
        """The slot was reset, by itself or because somebody asked: its next step acts."""
        self.waiting[slot] = False


def same_step_info(
    final_obs: object, final_info: Mapping[str, Any], reset_info: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the info of a SAME_STEP step that ended an episode and began the next one."""
    return {"final_obs": final_obs, "final_info": final_info, **reset_info}
