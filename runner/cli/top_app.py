"""The screen of `envbus top`: a table of runs, parts and processes, the latest faults, and keys.

Needs the extra `top` (Textual). Looks in a thread of its own, so that keys are answered meanwhile.
Leaves out what the rows say, and their order (`envbus.runner.monitoring.overview`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final

from rich.cells import cell_len
from rich.text import Text

from envbus.bus.brief import printable
from envbus.bus.errors import EnvbusError
from envbus.runner.cli.top import fault_line, style_of
from envbus.runner.extras import needed_for
from envbus.runner.monitoring.hung import HungLines
from envbus.runner.monitoring.observer import ObservedRun, Observer
from envbus.runner.monitoring.overview import COLUMNS, OverviewRow, overview_of
from envbus.runner.monitoring.runs import log_of, restart_process, stacks_of

with needed_for("`envbus top`", "top"):
    from textual import work
    from textual.app import App, ComposeResult
    from textual.binding import Binding, BindingType
    from textual.containers import VerticalScroll
    from textual.message import Message
    from textual.screen import ModalScreen
    from textual.widgets import DataTable, Footer, Input, Static

__all__ = ["Confirmation", "ProcessTable", "TextScreen", "TopApp"]

#: Rows that may be taken away one by one: each takes as long as there are rows.
_FEW: Final = 20
#: A column becomes narrower when it has so many cells to spare: it would twitch.
_SPARE: Final = 4


class ProcessTable(DataTable[Text]):
    """Rows by their places. Only what has changed of them is written; the cursor keeps its row."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("home", "scroll_top", "First", show=False),
        Binding("end", "scroll_bottom", "Last", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="processes", cursor_type="row")
        self._entries: list[OverviewRow] = []
        #: What was written: texts and style by row.
        self._written: list[tuple[tuple[str, ...], str]] = []

    def on_mount(self) -> None:
        """Make the columns."""
        for title, is_number in COLUMNS:
            label = Text(title, justify="right" if is_number else "left")
            self.add_column(label, key=title, width=len(title))

    @property
    def chosen(self) -> OverviewRow | None:
        """The row at the cursor; None: there is none."""
        place = self.cursor_row
        return self._entries[place] if 0 <= place < len(self._entries) else None

    def show(self, rows: Sequence[OverviewRow]) -> None:
        """Show these rows instead of those before."""
        chosen, top = self.chosen, self.scroll_offset.y
        self._entries = list(rows)
        wanted = [(row.cells(), style_of(row)) for row in rows]
        if len(wanted) < self.row_count - _FEW:
            self.clear()
            self._written = []
        for place in reversed(range(len(wanted), self.row_count)):
            self.remove_row(str(place))
        del self._written[len(wanted) :]
        for place, (texts, style) in enumerate(wanted):
            if place == len(self._written):
                self.add_row(*map(_cell, texts, _NUMBERS, [style] * len(texts)), key=str(place))
                self._written.append((texts, style))
                continue
            before, had_style = self._written[place]
            for column, text in enumerate(texts):
                if text != before[column] or style != had_style:
                    title, is_number = COLUMNS[column]
                    self.update_cell(str(place), title, _cell(text, is_number, style))
            self._written[place] = texts, style
        self._fit()
        if chosen is not None:
            keys = [row.key for row in rows]
            place = keys.index(chosen.key) if chosen.key in keys else self.cursor_row
            if place != self.cursor_row:
                self.move_cursor(row=place)
            elif self.scroll_offset.y != top:
                self.scroll_to(y=top, animate=False)

    def _fit(self) -> None:
        """Make columns as wide as what stands in them."""
        for number, column in enumerate(self.ordered_columns):
            widest = max((cell_len(texts[number]) for texts, _ in self._written), default=0)
            width = max(widest, len(column.label))
            if width > column.width or width < column.width - _SPARE:
                column.width = width
                if self._written:  # has the table find out how wide it is
                    value = self.get_cell("0", column.key)
                    self.update_cell("0", column.key, value, update_width=True)


class TextScreen(ModalScreen[None]):
    """Stacks or the log of a process, to be scrolled through.

    Args:
        title: Whose they are.
        text: They.
        at_end: Whether the end is what is seen first.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,s,l", "dismiss", "Close"),
    ]

    def __init__(self, title: str, text: str, *, at_end: bool = False) -> None:
        super().__init__()
        self._title = printable(title)
        self._text = "\n".join(map(printable, text.splitlines()))
        self._at_end = at_end

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        with VerticalScroll(id="reading") as panel:
            panel.border_title = Text(self._title).markup
            panel.border_subtitle = "Esc closes"
            yield Static(Text(self._text), id="reading-text")

    def on_mount(self) -> None:
        """Go to the end, if that is wanted."""
        if self._at_end:
            self.query_one("#reading", VerticalScroll).scroll_end(animate=False)


class Confirmation(ModalScreen[bool]):
    """Asks for y or n.

    Args:
        text: What is asked.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,q", "answer(False)", "No"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield Static(Text(f"{self._text}  y/n"), id="question")

    def action_answer(self, answer: bool) -> None:
        """Leave with an answer."""
        self.dismiss(answer)


class TopApp(App[None]):
    """Looks at runs and shows them, until q.

    Args:
        observer: Looks.
        lines: Knows where processes hang.
        empty: What is said where nothing runs.
        every: Seconds between two looks.
        stacks: Returns the stacks of a process by its id.
        log: Returns the end of what a process wrote to stderr.
        restart: Restarts a process: of the run with this process id, of this part, by its name
            and process id.
    """

    TITLE = "envbus top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #headline { height: 1; background: $panel; padding: 0 1; text-style: bold; }
    #processes { height: 1fr; }
    #empty { height: 1fr; padding: 1 2; display: none; }
    #faults { height: 8; border-top: solid $panel-lighten-2; }
    #faults-text { width: 100%; }
    #told { height: auto; max-height: 4; padding: 0 1; color: $warning; }
    #filter { display: none; }
    TextScreen, Confirmation { align: center middle; }
    #reading { width: 90%; height: 90%; border: round $primary; background: $surface; }
    #question { width: auto; max-width: 90%; padding: 1 3; border: round $warning;
                background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "stacks", "Stacks"),
        Binding("l", "log_tail", "Log"),
        Binding("r", "restart", "Restart"),
        Binding("slash", "filter", "Filter"),
        Binding("p", "pause", "Pause"),
        Binding("escape", "unfilter", "Show all", show=False),
    ]

    class Seen(Message):
        """The thread has looked.

        Args:
            runs: What it has seen.
            lines: Where processes hang.
            problem: Why it could not look; "": it could.
        """

        def __init__(
            self, runs: list[ObservedRun], lines: Mapping[int, str], problem: str = ""
        ) -> None:
            super().__init__()
            self.runs = runs
            self.lines = lines
            self.problem = problem
            #: What is to be shown of all; made here, where nobody waits for it.
            self.overview = overview_of(runs, lines)

    def __init__(
        self,
        observer: Observer,
        *,
        lines: HungLines | None = None,
        empty: str = "",
        every: float = 1.0,
        stacks: Callable[[int], str] = stacks_of,
        log: Callable[[int], str] = log_of,
        restart: Callable[[int, str, str, int], None] = restart_process,
    ) -> None:
        super().__init__()
        self._observer = observer
        self._lines = lines or HungLines()
        self._every = every
        self._stacks_of = stacks
        self._log_of = log
        self._restart = restart
        self._seen = self.Seen([], {})
        self._wanted = ""
        self._is_paused = self._is_looking = False
        # Held, as others may be on the screen in front of them.
        self._headline = Static(Text("looking ..."), id="headline")
        self._table = ProcessTable()
        self._nothing = Static(Text(empty), id="empty")
        self._faults = Static(id="faults-text")
        self._told = Static(id="told")
        self._filter = Input(id="filter", placeholder="name, state or process id; Enter keeps it")

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield self._headline
        yield self._table
        yield self._nothing
        with VerticalScroll(id="faults") as panel:
            panel.border_title = "Latest faults"
            yield self._faults
        yield self._told
        yield self._filter
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self._table.focus()
        self.set_interval(self._every, self._look)
        self._look()

    def tell(self, text: str) -> None:
        """Say something below the table, until there is something else to say."""
        self._told.update(Text(text))

    # --- what is seen ------------------------------------------------------------------------

    def _look(self) -> None:
        if not self._is_looking and not self._is_paused:
            self._is_looking = True
            self._look_in_a_thread()

    @work(thread=True)
    def _look_in_a_thread(self) -> None:
        runs: list[ObservedRun] = []
        lines: Mapping[int, str] = {}
        problem = ""
        try:
            runs = self._observer.look()
            lines = self._lines.look(runs)
        except EnvbusError as exc:
            problem = str(exc)
        self.post_message(self.Seen(runs, lines, problem))

    def on_top_app_seen(self, message: Seen) -> None:
        """Show what was seen."""
        self._is_looking = False
        self._seen = message
        if message.problem:
            self.tell(message.problem)
        if not self._is_paused:
            self._show()

    def _show(self) -> None:
        runs, seen = self._seen.runs, self._seen.overview
        if self._wanted:
            seen = overview_of(runs, self._seen.lines, self._wanted)
        words = [seen.headline()]
        words += [f"filter: {self._wanted}"] * bool(self._wanted)
        words += ["paused"] * self._is_paused
        self._headline.update(Text("   ".join(words)))
        self._nothing.display = not runs
        self._table.display = bool(runs)
        self._table.show(seen.rows)
        faults = Text("\n").join(fault_line(*fault) for fault in seen.latest)
        self._faults.update(faults)

    # --- keys --------------------------------------------------------------------------------

    def action_pause(self) -> None:
        """Stand still, or go on."""
        self._is_paused = not self._is_paused
        self._show()

    def action_filter(self) -> None:
        """Ask which rows are wanted."""
        self._filter.display = True
        self._filter.focus()

    def action_unfilter(self) -> None:
        """Show all rows."""
        self._filter.value = ""
        self._leave_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the rows that are wanted now."""
        self._wanted = event.value.strip()
        self._show()

    def on_input_submitted(self) -> None:
        """Go back to the table."""
        self._leave_filter()

    def _leave_filter(self) -> None:
        self._filter.display = False
        self._table.focus()

    def action_stacks(self) -> None:
        """Show what the chosen process is doing."""
        self._ask_chosen("stacks", self._stacks_of)

    def action_log_tail(self) -> None:
        """Show what the chosen process has written last."""
        self._ask_chosen("log", self._log_of, at_end=True)

    def _ask_chosen(self, what: str, ask: Callable[[int], str], *, at_end: bool = False) -> None:
        row = self._table.chosen
        if row is None or row.pid is None:
            self.tell(f"choose a row with a process id to see its {what}")
        else:
            self._ask_in_a_thread(f"{what} of {row.name} (pid {row.pid})", row.pid, ask, at_end)

    @work(thread=True)
    def _ask_in_a_thread(
        self, title: str, pid: int, ask: Callable[[int], str], at_end: bool
    ) -> None:
        try:
            text = ask(pid)
        except EnvbusError as exc:
            text = str(exc)
        self.call_from_thread(self.push_screen, TextScreen(title, text, at_end=at_end))

    def action_restart(self) -> None:
        """Restart the chosen process, if that is wanted."""
        row = self._table.chosen
        if row is None or not row.key.process or row.pid is None:
            self.tell("choose a process that runs: whole runs and parts are not restarted")
            return
        pid = row.pid

        def on_answer(answer: bool | None) -> None:
            if answer:
                self._restart_in_a_thread(*row.key, pid)

        text = f"Kill {row.name} of {row.key.part} (pid {row.pid}), so that it is started again?"
        self.push_screen(Confirmation(text), on_answer)

    @work(thread=True)
    def _restart_in_a_thread(self, run: int, part: str, process: str, pid: int) -> None:
        try:
            self._restart(run, part, process, pid)
            told = f"{process} of {part} (pid {pid}) was killed, to be started again"
        except (EnvbusError, OSError) as exc:
            told = str(exc)
        self.call_from_thread(self.tell, told)


_NUMBERS: Final = [is_number for _, is_number in COLUMNS]


def _cell(text: str, is_number: bool, style: str) -> Text:
    return Text(text, style, justify="right" if is_number else "left", no_wrap=True)
