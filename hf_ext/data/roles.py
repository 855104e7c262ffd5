"""Detection of the roles of a table's columns: time, series, label, inputs."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, combinations
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd

from ..errors import DataError
from ..terminal import count_of
from .cells import class_name, find_filled, is_clock, is_dated, is_number, seconds_of, to_seconds
from .tables import LABEL, Table, option, shorten

TIME = re.compile(
    r"(time|date|ds$|ts$|epoch|zeit|datum|step|steps|year|timestamp|datetime).*|.*(_|\b)(time|date|timestamp)",
    re.IGNORECASE,
)
# Columns of these names are times only if they rise: a month from 1 to 12 is a season, and t may be a temperature.
_RISING = re.compile(
    r"(t|month|quarter|day|week|hour|minute|seconds?|sec|ms|period|index|cycles?|frames?|ticks?)([ _-]?(no|number))?",
    re.IGNORECASE,
)
# Names of times that stay times where cells repeat: up_time, year_built, steps, and seasons may be channels.
_PLAIN = re.compile(
    r"(?i)((time|date|date_?time|zeit|datum|ds|ts|epoch|year|step|t|seconds?|sec|ms|index|cycles?|frames?|ticks?)"
    r"|time[ _-]?(stamp|step|index)|.*(_|\b)(date|timestamp))([ _-](no|number|s|ms|sec|seconds|utc))?\s*(\W.*)?"
)
_SERIES = re.compile(
    r"(series|unique|item|case|subject|patient|sensor|unit|machine|sample|example|trial|recording|participant|person"
    r"|user|device|engine|store|shop|product|sku|site|station|customer|vehicle|id|ids|sid|group)"
    r"([ _-]?(id|no|number))?",
    re.IGNORECASE,
)
# Columns that say from whom or where an example comes. Examples of one speaker resemble one another: a model that has
# heard one of them knows the others, so that they stay together, and the number of a speaker is no input.
_PERSONS = (
    "speaker|spk|subject|subj|patient|person|user|participant|animal|client|customer|author|writer|reader|singer|child"
    "|student|driver|donor|volunteer|player|worker|mouse|sprecher(in)?|proband(in)?|nutzer(in)?|kunden?|autor(in)?"
    "|locuteur|sujet|utilisateur|auteur|hablante|paciente|sujeto|usuario|cliente|paziente|utente"
)
_OTHERS = (
    "group|session|recording|device|machine|household|family|hospital|site|lot|batch|thread|conversation|dialogue"
    "|document|doc|article|video|clip|movie|song|slide|plate|case|visit|trial|fold"
)
PERSONS, GROUPS = (
    re.compile(rf"({names})s?([ _-]?(id|no|nr|number|nummer|name|code|key|uuid))?", re.IGNORECASE)
    for names in (_PERSONS, f"{_PERSONS}|{_OTHERS}")
)
# Numbers with a sign or a unit: 5 %, $5, 5 kg, (5) of accountants.
_SIGNED = re.compile(r"[-+(\u2212]?([$€£¥]?)\s*[-+]?[\d.,]+\s*([^\d\s.,()]{0,8})\)?")
# A row with this many numbers and rising column names is a series: t0, V1, 400.5, h06:30, 0.5 s.
_WIDE = 8
_COUNTED = re.compile(r"(.*?)((?:^-)?\d+(?:[.:]\d+)?)(\D*)")
# Names of columns that may be times.
_DATED = re.compile(r"(?<!\d)(19|20)\d\d(?!\d)|\d:\d\d|\d[./-]\d+[./-]\d\d|^[A-Z][a-z]{2,8}\W?\d")
# Parts of a time that are a column each.
_PARTS = re.compile(r"year|quarter|month|week|day|hour|minute", re.IGNORECASE)
_JOIN = "join them into one column"
# A column with a larger share of different texts contains prose or row names.
_REPEATS = 0.5
# Sizes of numbers that are nano-, micro- and milliseconds since 1970, and how many a second has.
_EPOCHS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))
# Units and their least lengths in seconds.
_UNITS = {"years": 365 * 86400, "months": 28 * 86400, "days": 86400, "hours": 3600, "min": 60}


@dataclass(frozen=True)
class Hints:
    """
    Hints of the user: names of columns, and of the two folders of pairs; `values` says whether whole numbers of a
    label are values, and no classes.
    """

    label: str | None = None
    time: str | None = None
    series: str | None = None
    inputs: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()
    values: bool | None = None


@dataclass
class Roles:
    """Roles of the columns of a table: label, time, names of series, and the inputs, numbers that a model gets."""

    # "positions": a row is a step of a series; "series": a row is a series; "texts"
    layout: str
    inputs: list[str]
    label: str | None = None
    time: str | None = None
    series: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    # Sentences on the interpretation of the time, and on what must be fixed before training
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def find_roles(table: Table, hints: Hints) -> Roles:
    """The roles of a table's columns; refuses a missing column, and several for one role, with the flag to use."""
    frame = table.frame
    named = [name for name in (hints.label, hints.time, hints.series, *hints.inputs) if name is not None]
    if absent := [name for name in named if name not in frame.columns]:
        raise DataError(f"there is no column {absent[0]!r}; the columns are {shorten(list(frame.columns))}")
    label = hints.label or _only([*filter(LABEL.fullmatch, frame)], "a label", "label")
    numbers = [name for name, kind in frame.dtypes.items() if pd.api.types.is_numeric_dtype(kind)]
    if table.nameless and label is None:
        label = _nameless_label(frame)
    if (wide := _find_wide(table, _without(numbers, [label]), label, hints)) is not None:
        return wide
    series = hints.series or _find_series(frame, label)
    time = hints.time or _find_time(frame, _without(frame, [label, series]), series)
    # As channels the parts of a time would be learned.
    parts = [*filter(_PARTS.fullmatch, numbers)] if time is None and not hints.inputs else []
    if len(parts) > 1 and "year" in map(str.lower, parts):
        raise DataError(f"{shorten(parts)} hold the time in parts: {_JOIN}, as in 2024-12-31")
    plain = [] if time else _without(filter(_PLAIN.fullmatch, numbers), [label, series], hints.inputs)
    spoiled = next((name for name in plain if _is_spoiled(frame, name, series)), None)
    time = time if hints.inputs else time or spoiled
    columns, known = dict(frame.items()), [label, time, series]
    texts = _without(frame, numbers, known)
    times = [name for name in texts if to_seconds(columns[name]) is not None]
    others = _without(texts, times)
    named = [name for name in numbers if GROUPS.fullmatch(name) or _is_copy(frame, name, label)]
    inputs = list(hints.inputs) or _without(numbers, known, named) or _without(numbers, known)
    prose = [name for name in others if is_prose(columns[name])]
    # One word a row, seldom the same, beside numbers: keys, serial numbers.
    words = {name: _list_words(columns[name]) for name in _without(others, prose)}
    names = [name for name, cells in words.items() if len({*cells}) > max(2, _REPEATS * len(cells))]
    if all(map(TIME.fullmatch, prose)) and not hints.inputs:
        _refuse_unread(frame, others, not inputs)
    if not inputs:
        names, prose = [], prose + names
    wrong = _without(hints.inputs, numbers)
    if wrong and {*wrong} != {*hints.inputs} - {*times}:
        raise DataError(f"{shorten(wrong)} holds no numbers: name inputs that are all texts, or all numbers")
    if not inputs or wrong or (prose and not hints.inputs):
        if not inputs and not prose and (time or not others):
            raise DataError("there is no column of numbers except times and names")
        return Roles("texts", list(hints.inputs) or prose or others, label)
    # A column of True and False is a class, or an input.
    asked = _without(others, names) + [name for name in inputs if pd.api.types.is_bool_dtype(frame[name].dtype)]
    if label is None and asked and not hints.inputs:
        rest = _without(inputs, asked)
        told = f"say which: {option('label', asked[0])} or {option('series', asked[0])}, or leave them out"
        kept = option("inputs", *rest[:6], *["…"] * (len(rest) > 6))
        raise DataError(f"{shorten(asked)} may name classes, or several series: {told}: {kept}")
    left_out = dict.fromkeys(others, "texts") | dict.fromkeys(names, "names of the rows")
    left_out |= dict.fromkeys(times, "another time")
    left_out |= dict.fromkeys(_without(numbers, inputs, known), "not among the inputs")
    told = "names the group or the class; --inputs takes it all the same"
    left_out |= dict.fromkeys(_without(named, inputs, known), told)
    notes = [f"{spoiled} repeats, so that the rows keep their order"] * (spoiled not in (None, time))
    roles = Roles("positions", inputs, label, time, series, left_out, notes)
    if not hints.inputs and (joined := find_joined(frame, roles)) is not None:
        raise DataError(f"{joined}; if all rows are one series, name the columns to read: --inputs NAME,NAME")
    _judge(frame, roles)
    return roles


def _refuse_unread(frame: pd.DataFrame, others: list[str], alone: bool) -> None:
    """Refuses columns of numbers or times that some cells spoil: without them the answer would be another."""
    for name in others:
        rows, cells = find_filled(frame[name])
        bad = [place for place, cell in enumerate(cells) if not is_number(cell)]
        begun = sum(re.match(r"[-+(<>~\u2212\[]*[.,]?\d", cell) is not None for cell in cells)
        if TIME.fullmatch(name) and begun > 0.8 * len(cells) and len(bad) >= 0.2 * len(cells):
            # Names the row.
            seconds_of(frame[name])
        signed = [_SIGNED.fullmatch(cell) for cell in cells]
        one_sign = len({found and found.groups() for found in signed}) == 1 and None not in signed
        if bad and (one_sign or len(bad) < 0.2 * len(cells) or (alone and begun == len(cells))):
            told = "is no number; correct it, remove the row, or name the columns to read: --inputs NAME,NAME"
            raise DataError(f"column {name!r}, row {rows[bad[0]] + 1}: {cells[bad[0]]!r:.60} {told}")


def find_joined(frame: pd.DataFrame, roles: Roles) -> str | None:
    """A sentence where series seem to be joined to one: their times begin again where a column changes."""
    known = [] if roles.series is None else [roles.series]
    keys = [name for name, why in roles.left_out.items() if why == "texts" and name in frame]
    keys = [name for name in keys if 1 < frame[name].nunique() <= _REPEATS * len(frame)]
    # Times of day begin again each day, or for each series.
    if not keys or (roles.time and not is_clock(frame[roles.time]) and _is_time_of(frame, roles.time, known)):
        return None
    # A column of times may have any name.
    times = [name for name, why in roles.left_out.items() if why == "another time"]
    for name in dict.fromkeys([*filter(may_rise, frame), *times]):
        for chosen in (chosen for count in (1, 2, 3) for chosen in combinations(keys, count)):
            if _is_time_of(frame, name, [*known, *chosen]) and not _is_time_of(frame, name, known):
                together = [*known, *chosen]
                advice = f"say {option('series', together[0])}" if len(together) == 1 else _JOIN
                return f"{name} begins again for each {' and '.join(chosen)}: {advice} if they name several series"
    return None


def may_rise(name: str) -> bool:
    return bool(TIME.fullmatch(name) or _RISING.fullmatch(name))


def _is_time_of(frame: pd.DataFrame, name: Any, keys: list[str]) -> bool:
    """True if a column differs in all rows of each series, of which some have several rows."""
    return not frame.duplicated([*keys, name]).any() and (not keys or bool(frame.duplicated(keys).any()))


def _is_copy(frame: pd.DataFrame, name: Any, label: str | None) -> bool:
    """True for numbers that say the label: each stands for one class or value, of values in their order or against."""
    if label is None or name == label:
        return False
    given = frame[[name, label]].dropna()
    classes, pairs = given[label].nunique(), given.drop_duplicates()
    # More than seven values are not in one order by chance.
    if pd.api.types.is_numeric_dtype(frame[label].dtype) and classes > 7:
        ranks = pairs.rank()
        return len(pairs) == classes and pairs[name].nunique() == classes and abs(ranks.corr().iloc[0, 1]) > 1 - 1e-9
    return len(pairs) == classes == given[name].nunique() and 1 < classes <= 0.5 * len(given)


def _without(names: Iterable[str], *others: Iterable[str | None]) -> list[str]:
    known = {*chain(*others)}
    return [name for name in names if name not in known]


def _only(names: list[str], what: str, flag: str) -> str | None:
    if len(names) > 1:
        raise DataError(f"{shorten(names)} may each be {what}: choose one, for instance {option(flag, names[0])}")
    return names[0] if names else None


def step_columns(names: list[str]) -> list[str]:
    """The columns that count the steps of a series in each row, `t0`, `t1` or `0.5 s`, `1.0 s`; none otherwise."""
    groups = _count_up(names)
    if len(groups) != 1 or len(groups[0]) < 0.8 * len(names):
        return []
    steps, given = [*groups[0]], [name for name in names if name in groups[0]]
    # Programs sort names as texts, t0, t1, t10, t2; any other order may be meant.
    is_clear = (np.diff([*groups[0].values()]) > 0).all() and given in (steps, steps[::-1], sorted(steps))
    return steps if is_clear else []


def _count_up(names: list[str]) -> list[dict[str, float]]:
    """Names that differ in a number alone, by this number, at least so many, also together, that they may be steps."""
    groups: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    dated = [name for name in names if _DATED.search(name)]
    seconds = to_seconds(pd.Series(dated)) if len(dated) >= _WIDE else None
    if seconds is not None and len({*seconds}) == len(dated):
        # One group, whose name no other has.
        groups["", "a date"] = dict(zip(dated, seconds, strict=True))
        names = _without(names, dated)
    for name in names:
        if (part := _COUNTED.fullmatch(name)) is not None:
            groups[part[1], part[3]][name] = float(part[2].replace(":", "."))
    found = [dict(sorted(group.items(), key=itemgetter(1))) for group in groups.values() if len(group) >= _WIDE / 2]
    return [group for group in found if len(group) >= _WIDE] or found * (sum(map(len, found)) >= _WIDE)


def _find_wide(table: Table, names: list[str], label: str | None, hints: Hints) -> Roles | None:
    """A table whose rows are series; None where a row is a step. Refuses one that may be either."""
    frame, groups = table.frame, _count_up(names)
    if hints.time is not None or hints.series is not None or hints.inputs:
        return None
    if table.nameless:
        return Roles("series", names, label)
    if not groups:
        return None
    is_whole = len(groups) == 1 and len(groups[0]) >= 0.8 * len(names)
    steps, counted = step_columns(names), [name for name in names if is_whole and name in groups[0]]
    rest = _without(frame, counted, [label])
    series = _find_series(frame[rest], label)
    time = _find_time(frame, _without(rest, [series]), series)
    several = len(groups) > 1 and time is None
    if not several and (time or series) and (not is_whole or (time and series)):
        return None
    if not steps or time or series:
        ends = " and ".join(f"{[*group][0]} to {[*group][-1]}" for group in groups)
        beside = option("time", time) if time else option("series", series)
        beside = beside if is_whole and (time or series) else "--inputs NAME,NAME"
        fix = "leave the other columns out, or save arrays [examples, steps, channels] in an .npz"
        if counted and not steps:
            ends += " are not in the order of their numbers, and"
            fix = "sort them, or number them by their order"
        if series and (group := GROUPS.fullmatch(series)) is not None:
            fix = f"rename {series} to {group[1]}_code, whose rows stay together, {fix}"
        told = f"may be channels, or the steps of a series in each row: say {beside} if a row is a step. If it is a "
        raise DataError(f"{ends} {told}series, {fix}")
    left_out = {name: "no step" if name in names else "texts" for name in rest}
    notes = [] if steps == counted else [f"columns in the order of their numbers, {steps[0]} to {steps[-1]}"]
    return Roles("series", steps, label, left_out=left_out, notes=notes)


def _nameless_label(frame: pd.DataFrame) -> str | None:
    """The first or the last column, where one of them holds few whole numbers."""
    first, *_, last = frame.columns
    fit = [name for name in (first, last) if _is_class(frame[name])]
    if len(fit) > 1:
        which = f"{option('label', first)} or {option('label', last)}"
        raise DataError(f"without names, the first and the last column may be the label: say which, {which}")
    return fit[0] if fit else None


def _is_class(values: "pd.Series[Any]") -> bool:
    if not pd.api.types.is_numeric_dtype(values.dtype):
        return True
    given = values.dropna()
    return bool((given % 1 == 0).all()) and given.nunique() <= max(2, len(given) // 2)


def is_prose(values: "pd.Series[Any]") -> bool:
    """True if cells are texts of several words, and no names."""
    cells = _list_words(values)
    if not cells or sum(map(len, cells)) > 30 * len(cells):
        return bool(cells)
    return _share(r"[^\W\d_]\W*\s.*[^\W\d_]", cells) > 0.5 and len(set(cells)) > min(20, _REPEATS * len(cells))


def _list_words(values: "pd.Series[Any]") -> list[str]:
    """The cells of a column of words; none where most have no letters, such as numbers with signs."""
    held = values.to_numpy(dtype=object)
    cells = [str(cell) for cell in held[pd.notna(held)]]
    return cells if cells and _share(r"[^\W\d_]", cells) > 0.5 else []


def _share(pattern: str, cells: list[str]) -> float:
    return sum(re.search(pattern, cell) is not None for cell in cells) / len(cells)


def _find_series(frame: pd.DataFrame, label: str | None) -> str | None:
    is_numeric = pd.api.types.is_numeric_dtype
    named = [name for name in frame if name != label and _SERIES.fullmatch(name)]
    cells = {name: frame[name] for name in named if 1 < frame[name].nunique() <= _REPEATS * len(frame)}
    found = [name for name, held in cells.items() if not is_numeric(held) or (held.dropna() % 1 == 0).all()]
    if len(found) > 1:
        # The times of a series differ: of those of one alone.
        for time in filter(may_rise, frame):
            if len(fit := [name for name in found if _is_time_of(frame, time, [name])]) == 1:
                return fit[0]
        told = f"choose one, {option('series', found[0])}; if they name a series together, {_JOIN}"
        raise DataError(f"{shorten(found)} may each be the name of a series: {told}")
    return found[0] if found else None


def _find_time(frame: pd.DataFrame, names: list[str], series: str | None) -> str | None:
    written, counted, columns = [], [], dict(frame.items())
    for place, name in enumerate(names):
        values, strong, named = columns[name], bool(TIME.fullmatch(name)), may_rise(name)
        if not pd.api.types.is_numeric_dtype(values.dtype):
            written += [name] if (named or place == 0) and to_seconds(values) is not None else []
        elif named and len(values) > 1:
            kept = [values] if series is None else [part for _, part in values.groupby(frame[series])]
            unique = all(part.is_unique for part in kept)
            rising = not strong and all(part.is_monotonic_increasing for part in kept)
            counted += [name] if unique and (strong or rising or all(map(_is_even, kept))) else []
    if len(written) == 2 and sum(is_clock(columns[name]) for name in written) == 1:
        raise DataError(f"{' and '.join(written)} hold a date and a time of day: {_JOIN}")
    # A date says more than the year beside it.
    return _only(written or counted, "the time", "time")


def _is_spoiled(frame: pd.DataFrame, name: str, series: str | None) -> bool:
    """True for numbers that rise as times do, but for cells that repeat or lack, or begin again."""
    kept = [frame[name]] if series is None else [part for _, part in frame[name].groupby(frame[series])]
    # Only clear names are times of any steps: frames, t, and ms may be measured.
    fits = all(map(_rises, kept)) and (TIME.fullmatch(name) or all(map(_counts, kept)))
    return bool(fits) and not all(part.is_unique for part in kept)


def _counts(values: "pd.Series[Any]") -> bool:
    """True if numbers rise by one size, each standing as often as others but for a few: none that drop or are cut."""
    steps = np.diff(values.dropna().to_numpy(np.float64))
    rises, runs = steps[steps > 0], np.diff([-1, *np.flatnonzero(steps), len(steps)])
    alike = (runs == np.median(runs)).mean() >= 0.9 and runs.max() <= 2 * np.median(runs)
    return bool(alike and np.allclose(rises, rises[0]))


def _rises(values: "pd.Series[Any]") -> bool:
    given = values.dropna().to_numpy(np.float64)
    steps, apart = np.diff(given), np.diff(np.unique(given))
    falls, rises = steps[steps < 0], steps[steps > 0]
    if len(rises) < 2:
        return False
    # A phase of a process lasts for many rows; seconds since 1970, and dates, may do so too.
    short = len(falls) + len(rises) >= 0.4 * len(steps) or given[0] > 1e8 or is_dated(values)
    # Most are alike, as rounded ones may be: in their order, or sorted.
    even, sorts = ((np.abs(part / np.median(part) - 1) <= 0.6).mean() >= 0.9 for part in (rises, apart))
    in_order = not len(falls) or (even and len(rises) >= 3 * len(falls))
    return bool((short and in_order) or (sorts and len(apart) >= 0.9 * len(steps)))


def _is_even(values: "pd.Series[Any]") -> bool:
    """True if numbers are a row of equal steps, in any order: hours that somebody shuffled."""
    steps = np.diff(np.sort(values.to_numpy(dtype=np.float64, na_value=np.nan)))
    return len(steps) > 1 and bool(np.allclose(steps, steps[0]))


def _judge(frame: pd.DataFrame, roles: Roles) -> None:
    """Says what the times are: their span and step, and whether they are sorted, repeated, with gaps."""
    parts = order_rows(frame, roles.series)
    unnamed = 0 if roles.series is None else int(frame[roles.series].map(class_name).isna().sum())
    if unnamed:
        told = count_of(unnamed, "row names", "rows name")
        roles.problems.append(f"{told} no series in {roles.series}: fill it in, or remove them")
    if roles.time is None:
        for name in (name for name, why in roles.left_out.items() if why == "texts" and TIME.fullmatch(name)):
            if _share(r"\d", [*frame[name].astype(str)]) > 0.5:
                roles.notes.append(f"not all cells of {name} are times, so that the rows keep their order")
        if re.search("jan feb m.r a.r ma. jun jul aug sep o.t nov de", " ".join(roles.inputs).lower()):
            roles.notes.append("months are channels: number their columns if each row is a series of 12 steps")
    if unnamed or roles.time is None:
        return
    cells = frame[roles.time]
    times = seconds_of(cells, [*parts.values()])
    if missing := int(np.isnan(times).sum()):
        roles.problems.append(f"{count_of(missing, 'row has', 'rows have')} no time in {roles.time}: remove them")
        return
    if any((np.diff(times[part]) < 0).any() for part in parts.values()):
        roles.notes.append(f"the rows are not in the order of {roles.time}, and are sorted by it")
    steps = np.concatenate([np.diff(np.sort(times[part])) for part in parts.values()])
    if not len(steps):
        return
    usual = float(np.median(steps[steps > 0])) if (steps > 0).any() else 0.0
    step, least, most = (_length(float(size), is_dated(cells), times) for size in (usual, steps.min(), steps.max()))
    first, last = cells.iloc[times.argmin()], cells.iloc[times.argmax()]
    roles.notes.insert(0, f"time in {roles.time}, {first} to {last}, a step of {step}")
    if repeated := int((steps == 0).sum()):
        found = (rows[pd.Series(times[rows]).duplicated().to_numpy()] for rows in parts.values())
        twice = cells.iloc[min(np.concatenate([*found]))]
        more = "" if roles.series else "; if they belong to several series, name their column: --series NAME"
        if more and pd.api.types.is_numeric_dtype(cells.dtype):
            more += f", or name the inputs, if it is one: {option('inputs', roles.time, 'NAME')}"
        told = count_of(repeated, "row repeats", "rows repeat")
        roles.problems.append(f"{told} a time in {roles.time}, such as {twice}: keep one of each{more}")
    elif len(steps) > 9 and (np.abs(steps - usual) > 0.5 * usual).mean() > 0.1:
        told = f"{least} to {most}: resample them, as with pandas' resample, or remove the time column"
        roles.problems.append(f"the steps of {roles.time} are irregular, {told}")
    elif wide := int((steps > 1.5 * usual).sum()):
        gaps = f"{count_of(wide, 'gap')} of up to {most}"
        roles.notes.append(f"{gaps}: the rows before and after are treated as neighbours")


def order_rows(frame: pd.DataFrame, series: str | None, time: str | None = None) -> dict[Any, np.ndarray]:
    """The rows of each series by its name, those of the only series by None, in the order of a time."""
    groups = {None: np.arange(len(frame))} if series is None else frame.groupby(series, sort=False).indices
    parts = {name: np.asarray(rows) for name, rows in groups.items()}
    if time is not None:
        order = seconds_of(frame[time], [*parts.values()])
        parts = {name: rows[np.argsort(order[rows], kind="stable")] for name, rows in parts.items()}
    return parts


def _length(step: float, dated: bool, times: np.ndarray) -> str:
    largest = float(np.abs(times).max())
    if not dated and not largest > 1e8:
        return f"{step:g}"
    seconds = step if dated else step / next((size for limit, size in _EPOCHS if largest > limit), 1)
    for unit, size in _UNITS.items():
        if seconds >= size:
            count = seconds / (30.4375 * 86400 if unit == "months" else size)
            count = round(count) if abs(count - round(count)) < 0.1 else count
            return f"{count:.3g} {unit.removesuffix('s') if count == 1 else unit}"
    return f"{seconds:g} s"
