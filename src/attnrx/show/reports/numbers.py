"""Formats numbers and records as text, with significant digits, typographic minus signs and units."""

import math
import re
from typing import Any

Number = float | int

MISSING = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"
GAP = "\N{NO-BREAK SPACE}"
NOTHING = 1e-12  # smaller values are rounding errors of zero
_SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def known(value: Number | None) -> Number | None:
    """Returns the value if it is a finite number, else None."""
    return value if value is not None and math.isfinite(value) else None


def number(value: Number | None, digits: int = 3) -> str:
    """Formats a number with `digits` significant digits. Very small and very large numbers get a power of ten."""
    if value is None or not math.isfinite(value):
        return MISSING
    # Integers are counts, so all of their digits are shown.
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) < 10**15):
        return f"{int(value):,}".replace("-", MINUS)
    if abs(value) < NOTHING:
        return "0"
    # The value is rounded before its exponent is computed, because with three digits 999.9 becomes 1,000.
    rounded = float(f"{value:.{digits - 1}e}")
    exponent = math.floor(math.log10(abs(rounded)))
    if -4 <= exponent < 6:
        return fixed(rounded, max(0, digits - 1 - exponent))
    mantissa = fixed(rounded / 10**exponent, digits - 1)
    return f"{mantissa}{GAP}{TIMES}{GAP}10{str(exponent).translate(_SUPERSCRIPT)}"


def short(value: Number | None, digits: int = 4) -> str:
    """Formats a number, e.g. a limit or the end of a scale, as `number` does, but without trailing zeros."""
    text = number(value, digits)
    return text.rstrip("0").rstrip(".") if "." in text and TIMES not in text else text


def fixed(value: Number, decimals: int, signed: bool = False) -> str:
    """Formats a number with `decimals` decimals and, if `signed`, a plus sign. Values that round to 0 have no sign."""
    # Without this case, a small negative value would be shown as -0.00.
    if round(value, decimals) == 0:
        return f"{0:.{decimals}f}"
    return f"{value:{'+' if signed else ''},.{decimals}f}".replace("-", MINUS)


def with_unit(text: str, unit: str) -> str:
    if not unit or text == MISSING:
        return text
    return text + TIMES if unit in ("x", TIMES) else f"{text}{GAP}{unit}"  # no space before the sign of a factor


def typeset(text: str) -> str:
    """Replaces ASCII characters by typographic ones: the minus, the "x" in "1.62x", and the space before "%"."""
    return re.sub(r"(?<=\d)x\b|(?<= )x(?= \d)", TIMES, re.sub(r"-(?=[\d.])", MINUS, text)).replace(" %", f"{GAP}%")


def percent(share: Number | None, digits: int = 3) -> str:
    """Formats a share as a percentage, e.g. 0.2308 as 23.1 %."""
    return MISSING if share is None else with_unit(number(100.0 * share, digits), "%")


def quantity(
    value: Number | None, unit: str = "", low: Number | None = None, high: Number | None = None, signed: bool = False
) -> str:
    """Formats a measured value. If the value has an interval, the interval's width sets the number of decimals."""
    if value is None or not math.isfinite(value):
        return MISSING
    decimals = _decimals(low, high)
    if decimals is not None:
        return with_unit(fixed(value, decimals, signed), unit)
    text = number(value)
    return with_unit(f"+{text}" if signed and value > 0 else text, unit)


def interval(low: Number | None, high: Number | None) -> str:
    """Formats an interval, e.g. [0.48, 0.62], or returns "" if there is none.

    The ends usually have enough decimals to show two significant digits of the interval's width.
    """
    if low is None or high is None:
        return ""
    decimals = _decimals(low, high)
    if decimals is None:
        return f"[{number(low)}, {number(high)}]"
    return f"[{fixed(low, decimals)}, {fixed(high, decimals)}]"


def plain(value: Any, longest: int = 8) -> str:
    """Formats any JSON value on one line. Long lists are truncated, and their length is appended."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: MISSING}[value]
    if isinstance(value, int):
        return str(value)  # no thousands separators, because the integer may be a seed, a size or a year
    if isinstance(value, float):
        return short(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {plain(item, longest)}" for key, item in value.items()) or MISSING
    if isinstance(value, list | tuple):
        texts = [plain(item, longest) for item in value[:longest]]
        nested = [isinstance(item, list | tuple) for item in value]
        shown = ", ".join(f"[{text}]" if inner else text for text, inner in zip(texts, nested, strict=False))
        return f"{shown}, … ({len(value)} in all)" if len(value) > longest else shown or MISSING
    return str(value)


def _decimals(low: Number | None, high: Number | None) -> int | None:
    if low is None or high is None or not math.isfinite(high - low) or high <= low:
        return None
    # The decimals show two significant digits of the width, because more digits would only show noise.
    decimals = 1 - math.floor(math.log10(high - low))
    return decimals if 0 <= decimals <= 5 else None
