"""Tools in the words of Hermes and Qwen: how they are described, called and answered in the turns of a chat.

The description is part of the system's turn, a call is JSON between `<tool_call>` and `</tool_call>`, and the results
of all calls of a turn are one turn of the user, as in the chat template of Qwen 2.5 and 3
(https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/tokenizer_config.json). Calls are read as by vLLM's parser `hermes`
(https://docs.vllm.ai/en/latest/features/tool_calling.html).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
BEGIN = "<tool_call>"
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class Call(NamedTuple):
    """One call of a tool. arguments: a JSON object, as text."""

    name: str
    arguments: str


def parse_calls(response: str) -> tuple[str, list[Call]]:
    """Return the text before the first call, and the calls; the whole response and no calls if one is unreadable."""
    calls = list[Call]()
    for found in CALL.findall(response):
        try:
            call = json.loads(found)
            calls.append(Call(call["name"], json.dumps(call["arguments"], ensure_ascii=False)))
        except (ValueError, KeyError, TypeError, RecursionError):
            return response, []
        if not isinstance(call["name"], str):
            return response, []
    return (response.partition(BEGIN)[0] if calls else response), calls


def as_turns(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[tuple[str, str]]:
    """Return role and text of each turn of a conversation.

    Args:
        messages: in the format of OpenAI's chat completions, with text alone.
        tools: in the same format; the first turn describes them.
    """
    turns, previous = list[tuple[str, str]](), ""
    for message in messages:
        role, text = message["role"], content_text(message)
        if role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if previous == "tool":
                text = f"{turns.pop()[1]}\n{text}"
        for call in message.get("tool_calls") or ():
            written = f'{{"name": "{call["function"]["name"]}", "arguments": {call["function"]["arguments"]}}}'
            text = "\n".join([*([text] if text else []), f"{BEGIN}\n{written}\n</tool_call>"])
        turns.append(("user" if role == "tool" else "system" if role == "developer" else role, text))
        previous = role
    if tools:
        described = DESCRIPTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if turns and turns[0][0] == "system":
            turns[0] = "system", f"{turns[0][1]}\n\n{described}"
        else:
            turns.insert(0, ("system", described))
    return turns


def content_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message. Raises ValueError if it has anything else, such as an image."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    if any(part.get("type") != "text" for part in content):
        raise ValueError("a message has parts other than text, which the policy cannot read")
    return "".join(part["text"] for part in content)
