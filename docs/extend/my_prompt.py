"""Prompt: the text around a question."""


def terse(question: str) -> str:
    """Ask for the result alone."""
    return f"Q: {question.strip()}\nGive only the result, after ####.\nA: "
