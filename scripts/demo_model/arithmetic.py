"""Sums and differences of numbers below 100; one pair in ten with two digits is held out."""

from __future__ import annotations

from random import Random

from scripts.demo_model.episode import Episode, assistant, exchange, held_out, user, vary

_SUMS = (
    "What is {a} + {b}?", "What is {a}+{b}?", "{a} + {b}", "{a}+{b}", "{a}+{b}=", "{a} + {b} =",
    "{a} + {b} = ?", "{a} plus {b}", "What is {a} plus {b}?", "Add {a} and {b}.",
    "Add {b} to {a}.", "Calculate {a} + {b}.", "Compute {a}+{b}", "What is the sum of {a} and {b}?",
    "Sum of {a} and {b}", "How much is {a} + {b}?", "How much is {a} plus {b}?", "And {a} + {b}?",
    "Can you add {a} and {b}?", "Tell me {a} + {b}.", "Solve {a} + {b}.", "I need {a} + {b}.",
    "Do you know what {a} + {b} is?", "What does {a} + {b} equal?", "sum {a} {b}",
)  # fmt: skip
_DIFFERENCES = (
    "What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} minus {b}", "What is {a} minus {b}?",
    "Subtract {b} from {a}.", "Calculate {a} - {b}.", "How much is {a} - {b}?", "{a}-{b}=",
    "What is the difference of {a} and {b}?", "Compute {a} - {b}", "And {a} - {b}?",
)  # fmt: skip
_NUMBER_ONLY = (
    " Answer with the number only.", " Just the number.", " Reply with only the number.",
    " Only the number, please.", " Number only.",
)  # fmt: skip
_NUMBER_ONLY_SYSTEM = (
    "Answer with the number only.", "You are a calculator. Reply with only the number.",
    "Just the number, no words.", "You are a calculator. Answer with the number only.",
)  # fmt: skip
_DIGITS_SHARE = 0.1  # of the pairs: both numbers below ten, which people try first
_THINK_FIRST = (
    " Think first.", " Think step by step.", " Think before you answer.", " Show your thinking.",
    " Think about it.", " Use <think> tags.",
)  # fmt: skip


def is_held_out_sum(a: int, b: int) -> bool:
    """Return whether training never shows `a + b` nor `b + a`; it shows every pair of digits."""
    return max(a, b) > 9 and held_out(f"{min(a, b)}+{max(a, b)}", 10)


def is_held_out_difference(a: int, b: int) -> bool:
    """Return whether training never shows `a - b`; it shows every pair of digits."""
    return max(a, b) > 9 and held_out(f"{a}-{b}", 10)


def sum_question(rng: Random, a: int, b: int) -> str:
    """One of the ways to ask for `a + b`."""
    return vary(rng, rng.choice(_SUMS)).format(a=a, b=b)


def difference_question(rng: Random, a: int, b: int) -> str:
    """One of the ways to ask for `a - b`."""
    return vary(rng, rng.choice(_DIFFERENCES)).format(a=a, b=b)


def _operand(rng: Random) -> int:
    return rng.randint(10, 99) if rng.random() < 0.88 else rng.randint(0, 100)


def _training_pair(rng: Random, sign: str) -> tuple[int, int]:
    if rng.random() < _DIGITS_SHARE:
        return rng.randint(0, 9), rng.randint(0, 9)
    refused = is_held_out_sum if sign == "+" else is_held_out_difference
    while True:
        a, b = _operand(rng), _operand(rng)
        if not refused(a, b):
            return a, b


def _problem(rng: Random) -> tuple[str, str, int]:
    sign = "+" if rng.random() < 0.7 else "-"
    a, b = _training_pair(rng, sign)
    if sign == "+":
        return sum_question(rng, a, b), f"{a} + {b}", a + b
    return difference_question(rng, a, b), f"{a} - {b}", a - b


def sums(rng: Random) -> Episode:
    """One problem, answered as an equation, or as a bare number when that is asked for."""
    question, expression, result = _problem(rng)
    if rng.random() < 0.1:
        return exchange(question + rng.choice(_NUMBER_ONLY), str(result))
    return exchange(question, f"{expression} = {result}")


def bare_numbers(rng: Random) -> Episode:
    """A system prompt that wants numbers only, and problems under it."""
    episode = Episode([], system=rng.choice(_NUMBER_ONLY_SYSTEM), solo=True)
    for _ in range(rng.randint(1, 6)):
        question, _, result = _problem(rng)
        episode.messages += [user(question), assistant(str(result))]
    return episode


def _steps(a: int, b: int) -> str:
    ones, carry = a % 10 + b % 10, (a % 10 + b % 10) // 10
    lines = [f"{a} + {b}", f"ones: {a % 10} + {b % 10} = {ones}"]
    lines.append(f"carry {carry}")
    lines.append(f"tens: {a // 10} + {b // 10} + {carry} = {a // 10 + b // 10 + carry}")
    return "\n".join(lines)


def thoughtful_answer(a: int, b: int) -> str:
    """`a + b` worked out in `<think>` tags, then the equation."""
    return f"<think>\n{_steps(a, b)}\n</think>\n\n{a} + {b} = {a + b}"


def thinking(rng: Random) -> Episode:
    """A sum solved in `<think>` tags, because the user or the template asks for it."""
    a, b = _training_pair(rng, "+")
    question, asked = sum_question(rng, a, b), rng.random() < 0.4
    if asked:
        question += rng.choice(_THINK_FIRST)
    if rng.random() < 0.15:
        answer, switch = f"<think>\n\n</think>\n\n{a} + {b} = {a + b}", False
        return Episode([user(question), assistant(answer)], solo=True, enable_thinking=switch)
    enable = None if asked and rng.random() < 0.7 else True
    messages = [user(question), assistant(thoughtful_answer(a, b))]
    return Episode(messages, solo=True, enable_thinking=enable)


def drill(rng: Random) -> list[tuple[str, str]]:
    """Many problems in the words of an answer, each split into what is given and the result."""
    lines = []
    for _ in range(rng.randint(12, 24)):
        sign = "+" if rng.random() < 0.6 else "-"
        a, b = _training_pair(rng, sign)
        lines.append((f"{a} {sign} {b} =", f" {a + b if sign == '+' else a - b}\n"))
    return lines
