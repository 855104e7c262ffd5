"""Tables as people have them: of each of many small inputs, what must be understood, or refused."""

import io
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from hf_ext.data.roles import Hints

HOURS = pd.date_range("2024-03-01", periods=24, freq="h")
RNG = np.random.default_rng(0)
NUMBERS = RNG.normal(size=(24, 3)).round(3)
WORDS = ["calm", "storm"]


def rows(columns: dict, separator: str = ",", number=str, quote: str = "") -> str:
    """A table of columns, as a program without pandas writes it."""
    lines = [separator.join(columns)]
    for row in zip(*columns.values(), strict=True):
        cells = (number(cell) if isinstance(cell, float) else str(cell) for cell in row)
        lines.append(separator.join(f"{quote}{cell}{quote}" for cell in cells))
    return "\n".join(lines) + "\n"


Y, Z = NUMBERS[:, 0].tolist(), NUMBERS[:, 1].tolist()
STATES = [WORDS[step // 6 % 2] for step in range(24)]
LABELLED = {"y": Y, "z": Z, "label": STATES}


def panel(names: list, label: list | None = None, times=range(12)) -> str:
    columns = {"series": [name for name in names for _ in times], "time": [*times] * len(names)}
    columns["y"] = RNG.normal(size=len(columns["series"])).round(3).tolist()
    return rows(columns | ({} if label is None else {"label": [value for value in label for _ in times]}))


def wide(names: list[str], labels: list, first: bool = False, count: int = 12, label: str = "label") -> str:
    steps = {name: RNG.normal(size=count).round(3).tolist() for name in names}
    given = {label: [labels[index % len(labels)] for index in range(count)]}
    return rows({**given, **steps} if first else {**steps, **given})


@dataclass
class Case:
    """Bytes, and what is in them; `refused` where nothing can be learned from them, with words of the reason."""

    text: str | bytes
    inputs: list[str] | int = field(default_factory=lambda: ["y", "z"])
    time: str | None = None
    series: str | None = None
    layout: str = "positions"
    classes: list[str] | None = field(default_factory=lambda: list(WORDS))
    refused: tuple[str, ...] = ()
    notes: str = ""
    hints: Hints = Hints()
    suffix: str = ".csv"
    encoding: str = "utf-8"
    values: bool = False


UNLABELLED = ("statsmodels", "sktime", "--label")
ONE = {"y": Y}
GERMAN = {"zeit": [str(hour) for hour in HOURS], "y": Y, "z": Z, "label": STATES}
GAP = [str(hour) for hour in [*HOURS[:12], *(HOURS[12:] + pd.Timedelta(hours=50))]]
MIXED = RNG.permutation(24)


def alone(**columns) -> Case:
    """One series of numbers `y` without a label: understood, and refused."""
    (name,) = columns
    return Case(rows({**columns, "y": Y}), ["y"], time=name, classes=None, refused=UNLABELLED)


def beside(name: str, cells: Iterable, **told) -> Case:
    """The labelled series with another column in front, or in the place of one of its own."""
    first = {} if name in LABELLED else {name: cells}
    return Case(rows(first | LABELLED | {name: cells}), **told)


def shops() -> str:
    """Twelve series of six weeks, each named by two columns together."""
    keys = [(shop, product) for shop in "NSEW" for product in ("tea", "nut", "jam") for _ in range(6)]
    columns = {"shop": [key[0] for key in keys], "product": [key[1] for key in keys], "week": [*range(6)] * 12}
    return rows({**columns, "y": RNG.normal(size=72).tolist(), "label": [*"aaaaaabbbbbb"] * 6})


def clock(start: float, step: float = 0.25, form: str = "%H:%M") -> str:
    """A table whose times are hours of the day, without dates."""
    times = [pd.Timestamp("2024-03-01") + pd.Timedelta(hours=start + row * step) for row in range(24)]
    return rows({"time": [time.strftime(form) for time in times], **LABELLED})


MONTHS = [f"{pd.Timestamp(2024, month, 1):%b}" for month in range(1, 13)]
STEPS = [f"t{step}" for step in range(20)]
INDEXED = pd.read_csv(io.StringIO(wide(STEPS, ["a", "b"]))).to_csv()
EVEN, TWICE = [*range(0, 60, 2)], [1] * 12 + [2] * 12
AMERICAN = [f"{1200000.5 + step:,.1f}" for step in range(24)]
EUROPEAN = [cell.translate({44: ".", 46: ","}) for cell in AMERICAN]


def with_comma(cell: float) -> str:
    return str(cell).replace(".", ",")


def without_some(cell: str, values: list) -> list:
    """Each fifth value replaced."""
    return [cell if step % 5 == 0 else value for step, value in enumerate(values)]


# fmt: off
CASES = {
    # the first column is an index or a time
    "plain": Case(rows(LABELLED)),
    "row numbers from the middle": beside("", range(100, 124), notes="counts the rows"),
    "id that counts": beside("id", range(24), notes="counts the rows"),
    "unnamed dates": beside("", HOURS, time="index"),
    "month of names": alone(Month=[f"{day:%b %Y}" for day in pd.date_range("1950-01-01", periods=24, freq="MS")]),
    "epoch in milliseconds": alone(timestamp=[1_700_000_000_000 + 60_000 * step for step in range(24)]),
    "first column of dates of any name": alone(jour=[*HOURS]),
    # Temperature is no time.
    "t that is none": beside("t", NUMBERS[:, 2].tolist(), inputs=["t", "y", "z"]),
    "month as a season": beside("month", [*range(1, 13)] * 2, inputs=["month", "y", "z"]),
    "a time in parts": Case(
        rows({"year": [2000] * 12 + [2001] * 12, "month": [*range(1, 13)] * 2, **LABELLED}),
        refused=("year, month", "join them"),
    ),
    "two times": Case(rows({"date": [*HOURS], "time": [*HOURS], **LABELLED}), refused=("--time",)),
    # cells of a time that repeat, and channels that are called as times are
    **{
        f"{name} that repeats": beside(name, cells, time=name, refused=("a time in", "--series", "--inputs"))
        for name, cells in {
            "time": [*range(12)] * 2, "t": [*range(8)] * 3, "Time(s)": [*range(23), 22],
            "year": sorted([*range(1990, 2013), 1999]), "date": [20240101 + step // 6 for step in range(24)],
            "timestamp": [1_700_000_000 + step // 4 for step in range(24)],
            "seconds": [0.1 * (step - (step > 9)) for step in range(24)],
            "step": [5 * step % 24 or 23 for step in range(24)], "sec": [step // 2 for step in range(24)],
        }.items()
    },
    **{
        f"{name} as a channel": beside(name, cells, inputs=[name, "y", "z"])
        for name, cells in {
            "time_spent": [step // 2 for step in range(24)],
            "year_built": [1950 + 37 * step % 20 for step in range(24)],
            "steps": [step * step // 3 for step in range(24)], "response_time": [37 * step % 20 for step in range(24)],
            "step": [step // 6 for step in range(24)], "hour": [*range(6)] * 4, "period": [*range(8)] * 3,
            "time": [step % 2 for step in range(24)], "month": [step // 2 for step in range(24)],
            "up_time": [step // 2 for step in range(24)], "wait_time": [min(step, 18) for step in range(24)],
            "t": [20 + (step + (step % 8 == 7)) / 10 for step in range(24)],
            "seconds": [max(0, step - 6) for step in range(24)], "ms": [step * step // 2 for step in range(24)],
            "frames": [2 * step // 3 for step in range(24)], "run_time": [*range(12)] * 2,
        }.items()
    },
    "a time that was named as a channel": beside(
        "time", [*range(12)] * 2, inputs=["time", "y"], hints=Hints(inputs=("time", "y"))
    ),
    "a time that is no input": beside(
        "time", [*range(12)] * 2, inputs=["y", "z"], hints=Hints(inputs=("y", "z")), notes="keep their order"
    ),
    "columns of months": Case(wide(MONTHS, STATES, count=24), MONTHS, notes="months are channels"),
    # order, repetition, gaps
    "unsorted": beside("time", HOURS[MIXED], time="time", notes="are sorted"),
    "repeated": beside("time", HOURS[np.arange(24) % 20], refused=("--series",)),
    "gap": beside("time", GAP, time="time", notes="1 gap of up to 2.12 days"),
    "irregular": beside("time", np.cumsum(RNG.integers(1, 99, 24)).tolist(), refused=("irregular", "resample")),
    "a time that is missing": beside("time", [*HOURS[:23], ""], hints=Hints(time="time"), refused=("time",)),
    # panels
    "panel of numbers": Case(panel([1, 2, 3, 4], ["a", "b", "a", "b"]), ["y"], "time", "series", classes=["a", "b"]),
    "panel without a label": Case(panel([1, 2, 3]), ["y"], refused=(*UNLABELLED, "3 series", "named in series")),
    "panel with a label a row": Case(rows({"subject": TWICE, "y": Y, "label": STATES}), ["y"], None, "subject"),
    # a row an example
    "wide, label last": Case(wide(STEPS, ["a", "b"]), 20, layout="series", classes=["a", "b"]),
    "wide without a label": Case(
        rows({f"t{step}": RNG.normal(size=9).round(3).tolist() for step in range(20)}), 20,
        refused=(*UNLABELLED, "9 series", "20 steps"),
    ),
    "wide of values": Case(wide([f"t{step}" for step in range(9)], [0.5, 2.5, 1.25]), 9, layout="series", values=True),
    "nameless, label first, tabs": Case(
        "\n".join("\t".join([str(row % 2 + 1), *map(str, RNG.normal(size=12).round(4))]) for row in range(10)), 12,
        layout="series", classes=["1", "2"], suffix=".tsv",
    ),
    "nameless, both ends": Case(
        "\n".join(",".join(map(str, [row % 2, *RNG.normal(size=9).round(4), row % 2])) for row in range(10)),
        refused=("--label",),
    ),
    "a name twice": Case(wide(STEPS, WORDS).replace("t2,", " t1 ,", 1), refused=("2 columns", "'t1'")),
    # how numbers are written
    "semicolons and decimal commas": Case(rows(GERMAN, ";", with_comma), time="zeit", notes="decimal commas"),
    "a line that names the separator": Case("sep=;\n" + rows(LABELLED, ";", with_comma), notes="semicolons"),
    "decimal commas in quotes": Case(rows(LABELLED, ",", with_comma, '"'), notes="decimal commas"),
    "thousands and decimals": Case(
        rows({"y": AMERICAN, "label": STATES}, quote='"'), ["y"], notes="commas between thousands"
    ),
    "German thousands": Case(rows({"y": EUROPEAN, "label": STATES}, ";"), ["y"], notes="decimal commas"),
    "spaces after commas": Case(rows(LABELLED, ", ")),
    "a row of units with time": Case(
        rows({"time": np.arange(24) / 2, **LABELLED}).replace("\n", "\ns,bar,l/min,-\n", 1), time="time",
        notes="time in s",
    ),
    "comment lines and a blank": Case("% a\n% b\n\n" + rows(LABELLED), notes="2 comment lines"),
    # encodings
    "latin-1": Case(rows({"größe": Y, "label": STATES}), ["größe"], encoding="latin-1", notes="latin-1"),
    "UTF-16 without a mark": Case(rows(LABELLED), encoding="utf-16-le", notes="UTF-16"),
    "quoted newlines": Case(rows({"y": Y, "label": ['"calm\nair"' if w == "calm" else w for w in STATES]}), ["y"],
                            classes=["calm\nair", "storm"]),
    # what is missing
    "empty cells": beside("y", without_some("", Y), notes="by a mask: y 5"),
    "a constant column": beside("z", [7.0] * 24, notes="z never changes"),
    "a channel without a number": beside("y", [""] * 24, notes="y never changes"),
    "a class called nan": beside("label", without_some("nan", STATES), classes=["calm", "nan", "storm"]),
    "a class that is missing": beside("label", without_some("", STATES)),
    # classes
    "a hole in 30 numbers": Case(wide(STEPS, EVEN, count=60), 20, layout="series", values=True, notes="--classes"),
    "numbers wanted as classes": Case(
        wide(STEPS, EVEN, count=60), 20, layout="series", classes=[*map(str, EVEN)], hints=Hints(values=False),
        notes="are classes",
    ),
    "classes wanted as values": Case(
        wide(STEPS, [1, 2, 3]), 20, layout="series", values=True, hints=Hints(values=True), notes="--classes"
    ),
    "names wanted as values": Case(wide(STEPS, WORDS), hints=Hints(values=True), refused=("--values", "names")),
    "1 and 01": Case(wide(STEPS, ["1", "01"]), refused=("'1'", "'01'")),
    "two ways to write an accent": Case(wide(STEPS, ["caf\u00e9", "cafe\u0301"]), refused=("spelled differently",)),
    "a class of one example": Case(
        wide(STEPS, ["storm", *["calm"] * 23], count=24), 20, layout="series", classes=["calm", "storm"],
        notes="the evaluation contains no storm",
    ),
    "true and false that nobody named": Case(
        rows({"y": Y, "z": Z, "ok": [w == "calm" for w in STATES]}), refused=("--label ok", "--inputs y,z")
    ),
    "two labels": beside("class", STATES, refused=("--label",)),
    "two spellings": beside("label", ["good ", "Good", "bad"] * 8, refused=("'Good'", "'good '")),
    "-1 and 1": beside("label", [-1, 1] * 12, classes=["-1", "1"]),
    "codes": beside("label", ["00", "01"] * 12, classes=["00", "01"]),
    "one class": beside("label", ["calm"] * 24, refused=("calm",)),
    "an input of texts": beside("w", ["u", "v"] * 12, hints=Hints(inputs=("y", "w")), refused=("w",)),
    "values of steps": beside("label", Z, refused=("mrconv-regression",)),
    "inputs that were named": beside("time", range(24), inputs=["z"], time="time", hints=Hints(inputs=("z",))),
    "a column that is not there": Case(rows(LABELLED), hints=Hints(label="nothing"), refused=("'nothing'",)),
    "a class for each row": beside("label", [f"L{step}" for step in range(24)], refused=("24",)),
    # one order of day and month for all dates
    "European days with times": beside(
        "date", (HOURS + pd.Timedelta(days=20)).strftime("%d/%m/%Y %H:%M"), time="date", notes="a step of 1 hour"
    ),
    "dates of two kinds": beside("date", ["2024-02-01", "2/2/2024"] * 12, refused=("2/2/2024", "2024-12-31")),
    "days or months": beside(
        "date", [f"{n % 12 + 1}/3/{2000 + n}" for n in range(24)], refused=("1/3/2000", "2024-12-31")
    ),
    "hours of a panel, shuffled": Case(
        rows({"patient": TWICE, "hour": [*RNG.permutation(12), *RNG.permutation(12)], "y": Y, "label": STATES}),
        ["y"], "hour", "patient", notes="are sorted",
    ),
    "written twice": Case(pd.read_csv(io.StringIO(INDEXED)).to_csv(), 20, layout="series", classes=["a", "b"]),
    "line ends of old Macs": Case(rows(LABELLED).replace("\n", "\r")),
    # several columns together
    "a panel of two columns": Case(shops(), refused=("shop, product", "join them")),
    "a row of a panel without a name": Case(
        panel([1, 2, 3], ["a", "b", "a"]).replace("\n1,", "\n,", 1), refused=("1 row names no series",)
    ),
    "a date and a clock": Case(
        rows({"day": [hour.date() for hour in HOURS], "clock": [f"{hour:%H:%M}" for hour in HOURS], **LABELLED})
        .replace("day,clock", "date,time"), refused=("date and time", "join them"),
    ),
    # times of day without dates, durations
    "a clock of one day": Case(clock(7.5), time="time", notes="07:30 to 13:15, a step of 15 min"),
    "a clock past midnight": Case(clock(22.5), refused=("'time'", "add the date")),
    "clocks of several towns": Case(
        rows({"town": ["N"] * 8 + ["S"] * 8 + ["E"] * 8, "time": [f"{(20 + step % 8) % 24}:00" for step in range(24)],
              **LABELLED}), refused=("time begins again", "--series town"),
    ),
    "a clock in no order": beside(
        "time", [f"{7 + place // 4:02}:{place % 4 * 15:02}" for place in MIXED], refused=("'time'", "add the date")
    ),
    **{
        f"times as {cells[0]}": beside("time", cells, time="time", notes=f"a step of {step}")
        for cells, step in (
            ([f"Q{step % 4 + 1} {2000 + step // 4}" for step in range(24)], "3 months"),
            ([f"{hour:%Y%m%d%H%M}" for hour in HOURS], "1 hour"), ([f"{1400 + n}-01-01" for n in range(24)], "1 year"),
            ([1_700_000_000_000_000_000 + step * 60_000_000_000 for step in range(24)], "1 min"),
        )
    },
    # cells that spoil a column: never left out in silence
    **{
        f"{cell!r} among {kind}": beside(
            "time", [*values[:7], cell, *values[8:]], refused=("'time'", "row 8", "--inputs")
        )
        for kind, values, cell in (
            ("dates", HOURS, ""), ("numbers", range(24), "Total"), ("numbers", range(24), "<5"),
        )
    },
    "weeks": beside("time", [f"2024-W{n:02}" for n in range(1, 25)], refused=("'time'", "row 1")),
    "a month in German": beside("time", ["7. Mai 2024"] * 24, refused=("'time'", "row 1")),
    **{
        f"numbers with signs, {form}": Case(
            rows({"y": [form.format(step) for step in range(24)], "label": STATES}), refused=("'y'", form.format(0))
        )
        for form in ("{} kg", "{}%", "${}", "({}.5)")
    },
    "exponents of FORTRAN": Case(rows({"y": ["0.5D+03"] * 24, "label": STATES}), refused=("0.5D+03",)),
    **{
        f"numbers as {cells[0]}": Case(rows({"y": cells, "label": STATES}), ["y"], notes=note)
        for cells, note in (
            (without_some("n.d.", Y), "y 5"), (without_some("#DIV/0!", Y), "y 5"), (without_some("–", Y), "y 5"),
            (without_some(-999, Y), "WARNING: -999 in y"), (without_some(99999, Y), "WARNING: 99999 in y"),
        )
    },
    # lines above the names, or none of names
    "names of R, without the index": Case(
        rows({"": range(1, 25), **LABELLED}).removeprefix(","), notes="the first column counts the rows"
    ),
    "no names, few columns": Case(rows(LABELLED).partition("\n")[2], refused=("names of the columns",)),
    # what cannot be read
    "an infinite number": beside("y", [*Y[:5], "inf", *Y[6:]], refused=("'y'", "row 6")),
    "stars and reviews without names": Case(
        "\n".join(f"{row % 5},a review of some words {row}" for row in range(24)), refused=("names of the columns",)
    ),
    "dates alone": Case(rows({"date": [*HOURS]}), refused=("no column of numbers",)),
    "a number of 400 digits": Case("y\n1\n" + "9" * 400 + "\n", refused=("too large",)),
    "a number of 5,000 digits in each series": Case(
        '{"y": [1, %s, 2], "label": "a"}\n' % ("9" * 5000) * 3, suffix=".jsonl", refused=("too large",)
    ),
    "no row": Case("y,label\n", refused=("no row",)),
    "no row of steps": Case(",".join([*STEPS, "label\n"]), refused=("no row",)),
    "uneven lines": Case("y,label\n1,a\n2,b,c\n", refused=("line 3",)),
}
# fmt: on
