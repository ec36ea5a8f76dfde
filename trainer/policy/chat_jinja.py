"""The prompts of a run as a chat template of Hugging Face: with it, transformers and vLLM write the same prompts.

https://huggingface.co/docs/transformers/chat_templating. The tests render both and compare them.
"""

import json
from typing import Any

from conf.schema.training.data import TableData
from conf.schema.training.prompts import Prompt, QuestionData
from trainer.data import chat
from trainer.data.chat import CHAT_TEMPLATES, ROLE_PLACEHOLDER, ChatTemplate, PromptPart, SpecialToken

MARK = "\0"
"""Stands for a message in a wording, which it splits."""
ONE_MESSAGE = "{{ messages[-1]['content'] }}"


def chat_template(data: Any) -> str | None:
    """Return the template of `data`; None if its prompts are no function of a message alone, as in plain text.

    Of runs with `data.chat_template` it writes turns and the system message; the wording of the questions around the
    messages (`data.prompt.question`) is left out, so that the model can be talked to.
    """
    if isinstance(data, QuestionData):
        form = CHAT_TEMPLATES.get(data.chat_template)
        bos = _text(data.bos or (form.bos if form else None) or "")
        if form is not None:
            return bos + _turns(form, data.prompt.system)
        return None if data.prompt.formatter is not None else bos + _plain(data.prompt)
    if isinstance(data, TableData) and data.template is not None and len(data.columns_of_prompt) == 1:
        before, _, after = data.template.prompt.format_map({data.columns_of_prompt[0]: MARK}).partition(MARK)
        return _text(data.bos or "") + _text(before) + ONE_MESSAGE + _text(after)
    return None


def _turns(form: ChatTemplate, system: str | None) -> str:
    begin = f"{{'role': 'system', 'content': {_literal(system)}}}" if system is not None else ""
    lines = []
    if begin:
        lines.append(
            f"{{% if messages[0]['role'] != 'system' %}}{{% set messages = [{begin}] + messages %}}{{% endif %}}"
        )
    if "system" not in form.role_names:  # it begins the first turn of the user
        both = "(messages[0]['content'] | trim) + '\\n\\n' + (messages[1]['content'] | trim)"
        lines.append(
            "{% if messages[0]['role'] == 'system' %}{% set messages = "
            f"[{{'role': 'user', 'content': {both}}}] + messages[2:] %}}{{% endif %}}"
        )
    content = "message['content'] | trim" if form.strips else "message['content']"
    names = ", ".join(f"{_literal(role)}: {_literal(name)}" for role, name in form.role_names.items())
    turn = f"{_parts(form.prefix, 'names[message.role]')}{{{{ {content} }}}}{_parts(form.suffix)}"
    lines.append(f"{{% set names = {{{names}}} %}}{{% for message in messages %}}{turn}{{% endfor %}}")
    answer = _parts(form.prefix, _literal(form.role_names["assistant"]))
    return "".join([*lines, f"{{% if add_generation_prompt %}}{answer}{{% endif %}}"])


def _plain(prompt: Prompt) -> str:
    """Return the template for models without turns: system message, shots and questions with their answers."""
    parts = chat.plain_prompt(prompt, MARK)[0]
    assert isinstance(parts, str)
    before, _, after = parts.partition(MARK)
    return _text(before) + ONE_MESSAGE + _text(after)


def _parts(parts: tuple[PromptPart, ...], role: str = "") -> str:
    """Return the template of some pieces of a prompt; `role` is the expression of the role's name."""
    written = [part.name if isinstance(part, SpecialToken) else part for part in parts]
    return "".join(f"{{{{ {role} }}}}" if part == ROLE_PLACEHOLDER else _text(part) for part in written)


def _text(text: str) -> str:
    """Return the template that writes exactly this text."""
    return f"{{{{ {_literal(text)} }}}}" if text else ""


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
