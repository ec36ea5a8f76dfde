"""Stated answers, "The answer is ...": what is right, what is wrong, and what cannot be told and is not paid."""

import json
from typing import NamedTuple

import pytest

from tests.conftest import wide
from tests.paths import SHARED
from trainer.rewards.equal import canonicalize
from trainer.rewards.extract import MAX_STATEMENT_CHARS, extract_answer
from trainer.rewards.functions import answer_match, answer_match_lenient


class Kind(NamedTuple):
    """Statements of one kind by correct answer: paid, wrong, and not paid since it cannot be told what they mean."""

    right: dict[str, list[str]]
    wrong: dict[str, list[str]]
    undecidable: dict[str, list[str]]


PMATRIX = r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"

STATED = {
    "numbers": Kind(
        {
            "18": [
                "18", "**18**", "*18*", "`18`", "$18$", r"\(18\)", "\n18", "\n\n\\[\n18\n\\]", "\n$$18$$", "18.0",
                "(C) 18", "D: 18", "exactly 18", "that Tom has 18 apples", "therefore 18", "18 and it is right",
                "**18** dollars",
                "18, because 9 + 9 = 18", "18 since 20 - 2 is 18", "18, as 3 * 6 = 18", "18, not 19",
                "18 rather than 19", "18 (dollars)", "**18.** Tom has 5", "$18.$ Tom has 5",
            ],
            "-18": ["-18", "$-18$", "\u221218", "\u201318", "negative 18", "minus 18", "-$18"],
            "1800": ["1,800", "1 800", "1{,}800", r"1\,800"],
        },
        {
            "18": [
                "18 or 19", "19", "18?", "not 18", "18 or so", "18, which is wrong", "18, but I am not sure", "-18",
                "maybe 18", "probably 18", "18 if Tom comes", "18 unless he leaves", "at least 18", "18 at most",
                "no more than 18", "half of 18", "twice 18", "the square root of 18", "f(18)", "x18", "18x",
                "$x >= 18$", "x <= 18", "x != 18", "negative 18", "18 and a half", "18 and up", "18 thirds",
                "18\u0338", "18, I think", "18 at the very least", "a minimum of 18", "18 over x", "sin 18",
                "somewhere near 18",
            ],
            "5": ["5! = 120", "5!", "17, not 5"],
            "3": ["$2^3$", "3^2", "3\u00b2", "10\u00b3"],
        },
        {},
    ),
    "fractions": Kind(
        {
            r"\frac{3}{4}": [r"$\frac{3}{4}$", "3/4", r"$\dfrac{3}{4}$ of the cake", "0.75", r"\frac34", "\u00be",
                             "3\u20444"],
            "0.75": [r"$\frac{3}{4}$", "3/4", ".75"],
            "7/2": ["3 1/2", r"$3\frac{1}{2}$", "3\u00bd", "3.5", "3 and 1/2", "7/2 hours"],
            "1/3": [r"$0.\overline{3}$", r"0.\overline3 cm", r"$33.\overline{3}\%$", r"$\frac{3}{9} = 0.\bar{3}$"],
            r"-\frac{7}{6}": [r"$-1.1\overline{6}$"],
            r"0.\overline{142857}": ["1/7", r"$\frac{1}{7}$"],
            "1": [r"$0.\overline{9}$"],
        },
        {
            "3": [r"$\frac{3}{4}$", "3/4", "3 1/2", "3\u00bd", r"$3\frac{1}{2}$", "3 and 1/2", "6/2"],
            "4": [r"$\frac{3}{4}$", "3/4"],
            "3/4": ["4/3", "6/8", "3", "0.7", "3/4 or 1/2", r"$\frac{3}{4}$ or so", "-3/4"],
            "1/2": ["3 1/2", "3 and 1/2", "2/4", "x = 1, y = 1/2"],
            "1/3": ["0.333", "0.3", r"$-0.\overline{3}$", r"$0.3\overline{4}$", r"$\frac{1}{4} = 0.\overline{3}$"],
            "1/9": [r"$0.\dot{1}4285\dot{7}$"],
        },
        {"3/4": ["3 out of 4", "3 in 4", "three quarters"], "3": ["3 out of 4", "3 of 4", "3 in 4"]},
    ),
    "expressions": Kind(
        {
            r"3\sqrt{2}": [r"$3\sqrt{2}$", r"$3\sqrt{2}$ meters", "3\u221a2", r"$\sqrt{18}$", r"simply $3\sqrt{2}$"],
            r"3\pi": [r"$3\pi$", "3\u03c0", r"\(3\pi\)"],
            "3x+1": ["$3x + 1$", "3x+1", "$1 + 3x$", "$y = 3x + 1$"],
            "2+3i": ["2 + 3i", "$2+3i$", "$3i + 2$"],
            "2^5": ["$2^5$", "$2^{5}$"],
        },
        {
            "3": [r"$3\sqrt{2}$", r"$3\pi$", "3x + 1", "3\u221a2", "3\u03c0", "$3^2$", "3i", "3 + 4", "3 plus 4",
                  "3 times 4"],
            "2": ["2 + 3i", "$2^5$", r"$2\sqrt{3}$", "2 - 1", "2 minus 1", "2 squared", r"$3\sqrt{2}$"],
            r"3\sqrt{2}": [r"$2\sqrt{3}$", r"more than $3\sqrt{2}$", r"$3\sqrt{2}$ or $3$", r"at least $3\sqrt{2}$"],
            "7": ["3 + 4", "$3+4$", r"$\frac{14}{2}$", "14/2"],
        },
        {},
    ),
    "tuples, intervals, sets and matrices": Kind(
        {
            "(3,4)": ["(3, 4)", "$(3,4)$", r"$\left( 3, 4 \right)$", "the point $(3, 4)$", "the ordered pair (3, 4)"],
            "[2,5)": ["[2, 5)", "$[2, 5)$", "the interval $[2,5)$", r"$x \in [2, 5)$"],
            r"(-\infty,3)": [r"$(-\infty, 3)$", "(-\u221e, 3)"],
            r"\{1,2\}": [r"$\{1, 2\}$", r"$\{2, 1\}$", r"the set $\{1,2\}$"],
            PMATRIX: [f"${PMATRIX}$", "$$\n" + PMATRIX.replace(" ", "\n") + "\n$$", rf"\[{PMATRIX}\]"],
            "1,2,3": ["1, 2, and 3", "1, 2, 3", "1, 2 and 3", "$1, 2, 3$"],
        },
        {
            "3": ["(3, 4)", "[3, 4]", r"$\{3, 4\}$", "3, 4", "3 and 4", "(3, 3)"],
            "(3,4)": ["(4, 3)", "3", "(3, 4) or (4, 3)", "(3, 4) and (4, 3)", "(3, 4), (4, 3)", "(3, 4, 5)",
                      "(2+1, 4)"],
            "[2,5)": ["(2, 5]", "[2, 5]", "(2, 5)", "2", "5"],
            r"\{1,2\}": [r"$\{1, 3\}$", "1", r"$\{1\}$"],
            PMATRIX: [r"$\begin{pmatrix} 2 \\ 1 \end{pmatrix}$", "1", r"$\begin{pmatrix} 1 & 2 \end{pmatrix}$"],
            "1": ["1, 2, and 3", "1, 2"],
            "1,2,3": ["1, 2", "1, 2, and 4", "1, 2, 3, and 4", "6"],
        },
        {"1,2": ["1 or 2"]},
    ),
    "ratios, times, dates and ranges": Kind(
        {
            "3:2": ["3:2", "3 : 2", "$3:2$", "3 to 2", "3/2"],
            "5:30": ["5:30", "5:30 PM", "5:30 a.m.", "05:30", "at 5:30"],
            "5:30 PM": ["5:30 p.m.", "5:30pm", "17:30", r"5:30 \text{ PM}"],
            "17:30": ["5:30 PM", "17:30:00"],
            "10-12": ["10-12", "10\u201312"],
            "2024-05-03": ["2024-05-03"],
        },
        {
            "3": ["3:2", "3 to 2", "3:02", "3-4", "3\u20134"],
            "5": ["5:30", "5:30 PM", "5 to 6", "between 5 and 6", "5-6"],
            "5:30 PM": ["5:30 AM", "5:31 PM", "5 PM", "6:30 PM"],
            "5 PM": ["5 AM", "6 PM"],
            "10": ["10 to 12", "between 10 and 12", "from 10 to 12", "10-12", "10\u201312", "10 through 12",
                   "10 \u00b1 1"],
            "12": ["10 to 12", "between 10 and 12", "10-12"],
            "2024": ["2024-05-03", "05/03/2024"],
            "3:2": ["2:3", "3", "6:4"],
        },
        {"5:30 PM": ["5:30"], "2024": ["May 3, 2024"]},
    ),
    "units": Kind(
        {
            "18": [
                "18 dollars", "18 km/h", "18 m^2", "18 cm\u00b2", "18\u00b0C", "18 degrees", "18 years old",
                "an 18-year-old", "18 dollars for 3 days", "18 apples in 3 baskets", "18 dollars for the two boys",
                "18 miles per hour", "18 eggs left after he ate 3", "18 dollars from the 3 days",
                "18 more than Tom has", r"$18\text{ cm}$", "$18$ dollars for $3$ days",
                "18 dollars at the farmers' market every day",
            ],
            "18 cm": ["18", "18 cm", "18 centimeters", r"$18\text{ cm}$"],
            "3 hours and 20 minutes": ["3 hours and 20 minutes", "3 hours, 20 minutes"],
        },
        {
            "3": ["3 hours and 20 minutes", "3 hours 20 minutes", "3 feet 4 inches", "3 dollars and 50 cents",
                  "3'4\""],
            "20": ["3 hours and 20 minutes", "20 minutes, i.e. 1/3 of an hour"],
            "18": ["18 dollars for sure or nineteen", "18 dollars at most", "18 apples for Tom and 19 for Jane",
                   "18 euros, which is 19 dollars", "18 per 2 hours", "18 hours and thirty minutes"],
            "18 cm": ["18 m", "18 inches", r"$18\text{ km}$"],
            "5 minutes": ["5 hours", "5 seconds"],
            "18 dollars": ["18 cents"],
        },
        {"18": ["18 out of 20", "18 of the 20 students", "18% of the 50 students"], "36": ["3 dozen"],
         "120 minutes": ["2 hours"]},
    ),
    "percent, currency and magnitude": Kind(
        {
            "50": ["50%", r"$50\%$", "50 percent", "50 %"],
            r"50\%": ["50%", "50", "0.5", "1/2", "50 percent"],
            "0.5": ["50%", r"50\%", "50 per cent"],
            "18": ["$18", r"\$18", "\u20ac18", "18 \u20ac", "\u20b918", "18 USD", "US$18", "$18.00", "\u00a318",
                   "18\u00a2"],
            "18.5": ["$18.50", "18.50 dollars"],
            "3500000": ["3.5 million", "$3.5 million", "$3.5M", "3,500,000", "3.5 million dollars", "3 1/2 million"],
            "200000": ["2 hundred thousand", "200 thousand", "200k"],
            "3.5 million": ["3.5 million", "3500000"],
        },
        {
            "3.5": ["3.5 million", "$3.5M", "3.5bn", "$3.5 million"],
            "2": ["2 hundred thousand", "2k", "2 billion"],
            "200": ["2 hundred thousand"],
            r"50\%": ["5%", "0.05", "500"],
            "0.5": ["5%", "500%"],
            "18": ["$18-$20", "$18 or $19", "$18 and 50 cents", "18 hundred", "$18.50"],
        },
        {r"100\%": ["1"], "0.18": ["18 cents"]},
    ),
    "scientific notation": Kind(
        {
            "300000": ["3e5", r"$3 \times 10^5$", "3 \u00d7 10^5", "3 \u00d7 10\u2075", r"3 \cdot 10^{5}", "3 x 10^5",
                       "3*10**5"],
            r"3 \times 10^5": ["300000", "300,000", r"$3\times 10^{5}$", "3e5"],
            "0.0018": [r"$1.8 \times 10^{-3}$", "1.8e-3", "1.8 \u00d7 10\u207b\u00b3"],
        },
        {"3": ["3e5", r"$3 \times 10^5$", "3 \u00d7 10\u2075"], "300000": [r"$3 \times 10^6$", "3e4",
               r"$30 \times 10^4$"]},
        {"100000": ["10^5"]},
    ),
    "equalities": Kind(
        {
            "18": ["9+9=18", "18=9+9", "x = 20-2 = 18", "18 = 18.0", "$9 + $9 = $18", "6 \u00d7 3 = 18", "x = 18",
                   r"$6 \times 3 = 18$", "54/3 = 18 dollars", "17.6 \u2248 18", "x \u2248 18", "x := 18"],
            "0.33": [r"$\frac{1}{3} \approx 0.33$", "1/3 \u2248 0.33"],
            "0.5": ["1/2 = 0.5", "0.5 = 50%"],
            "2/3": ["2/3 \u2248 0.67", r"$\frac{2}{3} \approx 0.667$"],
            r"\sqrt{2}": [r"$\sqrt{2} \approx 1.41$"],
            r"4\pi": ["4\u03c0 \u2248 12.57"],
        },
        {
            "18": ["17=18", "18=17", "9+8=18", "18=9+8", "18 = 17 + 1 = 19", "x = 3, y = 18", "x = 18 and y = 3",
                   "9+9", "17 \u2248 18", "36/2", "18 = x, 19"],
            "17": ["17=18", "18=17", "17 \u2248 18"],
            "3/4": ["17/2 = 3/4", "a = 3 so b = 3/4"],
            "2/3": ["1/2 \u2248 0.67", "2/3 \u2248 0.75", "3/4 \u2248 0.75"],
        },
        {},
    ),
    "invisible characters": Kind(
        {
            "18": ["18\u200b", "\u200b18", "18\ufeff", "1\u200b8", "18\u2060 dollars", "\u200e18\u200f",
                   "18\u00a0dollars", "18\ufe0f"],
            "Paris": ["Paris\u200b", "\ufeffParis"],
            "1800": ["1\u202f800", "1\u2009800"],
        },
        {"18": ["19\u200b", "\u202e81", "1\u20628"]},
        {},
    ),
    "choices": Kind(
        {
            "C": [
                "C", "(C)", "C.", "**C**", "C. mitochondria", "C: mitochondria", "C) mitochondria",
                "(C) mitochondria", "[C] mitochondria", r"\text{C: mitochondria}", r"\textbf{(C)}\ 12", "(C) 12",
                "C. 12", "C: 12", "(c)", "option C", "choice (C)", "C because D is too small", "C (mitochondria)",
                r"$\mathrm{(C)}$ 12", "C: False", "(C) not enough information", "C. None of the above",
                "(C) rain or snow", "C is correct", "C - mitochondria", "**C** \u2013 mitochondria", "(C) \u2014 rain",
            ],
            "(C)": ["C", "C. mitochondria"],
            "(C) 12": ["C", "(C) 12", "12", "C) 12"],
        },
        {
            "C": ["D", "(D)", "D. mitochondria", "C or D", "C, D", "(C) and (D)", "(C) or D", "C: 12, D: 13", "not C",
                  "C is wrong", "(C), which is wrong", "C. No, it is D", "(C) is not correct", "AC", "C3",
                  "mitochondria", "C - D", "C - wrong", "C - mitochondria or D - nucleus", "C-reactive protein"],
            "(C) 12": ["(D) 12", "D", "(C) 13", "13"],
            "A": ["a cat", "A cat"],
        },
        {"C": ["C mitochondria", "C, mitochondria", "(C), (C)", "C - 1"]},
    ),
    "words": Kind(
        {"Paris": ["Paris", "**Paris**", '"Paris"', "Paris, because it is"], "yes": ["yes", "Yes, since 3 is prime"],
         "no": ["no", "No."], "7 Brides for 7 Brothers": ["7 Brides for 7 Brothers"]},
        {"Paris": ["Rome", "Paris or Rome", "not Paris", "Paris and Rome"], "no": ["yes"],
        "7": ["7 Brides for 7 Brothers or 8"]},
        {"Paris": ["Paris, the capital of France"]},
    ),
}  # fmt: skip


def rows(verdict: str) -> list[tuple[str, str]]:
    kinds = [getattr(kind, verdict) for kind in STATED.values()]
    return [(said, gold) for kind in kinds for gold, statements in kind.items() for said in statements]


LEFT_TO_COMPUTE = {
    *(
        ("6:4", "3:2"),
        ("6/2", "3"),
        ("6/8", "3/4"),
        ("2/4", "1/2"),
        ("3 + 4", "7"),
        ("$3+4$", "7"),
        (r"$\frac{14}{2}$", "7"),
    ),
    *(("14/2", "7"), ("9+9", "18"), ("36/2", "18"), ("(2+1, 4)", "(3,4)"), (r"$30 \times 10^4$", "300000")),
}
"""What is wrong only because it is not written out."""


@pytest.mark.parametrize("kind", STATED)
def test_a_statement_is_compared_whole(kind: str) -> None:
    judged = {
        verdict: [
            (said, gold, answer_match(f"Tom has 3 apples. The answer is {said}.", gold))
            for gold, statements in getattr(STATED[kind], verdict).items()
            for said in statements
        ]
        for verdict in Kind._fields
    }
    assert [row for row in judged["right"] if row[2] != 1] == []
    assert [row for row in judged["wrong"] + judged["undecidable"] if row[2] != 0] == []


def test_the_lenient_reward_pays_what_is_left_to_compute_and_no_other_wrong_statement() -> None:
    paid = {row for row in rows("wrong") if answer_match_lenient(f"The answer is {row[0]}.", row[1])}
    assert paid == LEFT_TO_COMPUTE
    assert [row for row in rows("right") if not answer_match_lenient(f"The answer is {row[0]}.", row[1])] == []


@pytest.mark.parametrize(
    "form",
    [
        "The correct option is %s.", "The correct choice: %s", "The final answer is %s.", "the answer is: %s",
        "The answer to this problem is %s.", "The answer to the math question is %s!", "Answer: %s", "**Answer**: %s",
        "**Answer:** %s", "**The answer is %s.**", "The answer is **%s**.", "The answer would be %s",
        "The answer must be %s. Tom has 5.", "ANSWER = %s\nTom has 5.", "The answer equals %s, since 5 is not.",
        "The answer\u200b is %s", "The answer is 5. No, the best option is %s",
    ],
)  # fmt: skip
def test_what_states_an_answer(form: str) -> None:
    for said, gold in (("18", "18"), ("C", "C"), (r"$\frac{3}{4}$", "3/4")):
        assert answer_match(form % said, gold) == 1
        assert answer_match(form % said, "5") == 0


@pytest.mark.parametrize(
    ("response", "gold", "reward"),
    [
        ("The answers are 1 and 2.", "2", 0),
        ("The answers are 1 and 2.", "1, 2", 1),
        ("The answer is 18. False.", "18", 0),
        ("The answer is C. Wrong.", "C", 0),
        ("The answer is C. Mitochondria make ATP. They are not D. nuclei.", "C", 1),
        ("It costs 3.5 million", "3500000", 1),
        ("It costs 3.5 million", "3.5", 0),
        ("It is 17, not 18", "18", 0),
        ("It is 17, not 18", "17", 1),
        (f"The answer is 18{' ' * MAX_STATEMENT_CHARS}or 19", "18", 0),
        (f"The answer is 18 because {'x ' * MAX_STATEMENT_CHARS}", "18", 1),
        ("#### 18\u200b", "18", 1),
        ("#### 17=18", "18", 0),
        ("#### 18=9+9", "18", 1),
        (r"\boxed{C. mitochondria}", "C", 1),
        (r"\boxed{\text{C: mitochondria}}", "C", 1),
        (r"\boxed{\textbf{(C)}\ 12}", "C", 1),
        (r"\boxed{\textbf{(C)}\ 12}", "D", 0),
        ("#### (B) 7", "B", 1),
        ("#### 5!", "5", 0),
        (r"\boxed{3.5 \text{ million}}", "3.5", 0),
        (r"\boxed{5 \text{ PM}}", "5 AM", 0),
        ("#### 18 dollars for 3 days", "18", 1),
    ],
)
def test_other_forms_are_judged_alike(response: str, gold: str, reward: float) -> None:
    assert answer_match(response, gold) == reward


@pytest.mark.parametrize(
    ("answers", "canonical"),
    [
        (["C", "(C)", "C. mitochondria", r"\textbf{(C)}\ 12", "option C"], "c"),
        (["3.5 million", "3500000", "$3.5M", "3,500,000 dollars"], "3500000"),
        (["18", "9+9=18", "18 = 9+9", "18\u200b", "18 dollars for 3 days"], "18"),
        (["(3, 4)", "(3,4)"], "(3,4)"),
        (["17 = 18"], "17=18"),
    ],
)
def test_one_answer_has_one_vote(answers: list[str], canonical: str) -> None:
    assert {canonicalize(extract_answer(f"The answer is {answer}.") or "") for answer in answers} == {canonical}


GSM8K = [SHARED / "data" / "gsm8k" / f"{split}.jsonl" for split in ("train", "test")]


@pytest.mark.parametrize("every", [50, *wide(1)])
def test_every_answer_of_gsm8k_is_right_in_each_form_behind_its_worked_solution(every: int) -> None:
    if not all(file.exists() for file in GSM8K):
        pytest.skip("needs GSM8K")
    lines = [line for file in GSM8K for line in file.read_text().splitlines()]
    assert len(lines) == 8792
    for line in lines[::every]:
        worked, _, gold = json.loads(line)["answer"].rpartition("\n#### ")
        for form in ("#### %s", "\\boxed{%s}", "The answer is %s.", "The answer is $%s, because of this."):
            assert answer_match(f"{worked}\n{form % gold}", gold) == 1, (form, gold)
            assert answer_match(f"{worked}\n{form % f'{gold}1'}", gold) == 0, (form, gold)
