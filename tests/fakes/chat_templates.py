"""Chat templates with the effect of published ones, which are not ours to copy; see trainer/fixtures/make_chats.py."""

GEMMA2 = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for turn in messages %}
    {%- set asks = loop.index0 is even %}
    {%- if asks != (turn.role == 'user') %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' ~ ('user' if asks else 'model') ~ '\\n' ~ turn.content.strip() ~ '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

GEMMA3 = """{{ bos_token }}
{%- set told = namespace(first='', from=0) %}
{%- if messages[0].role == 'system' %}
    {%- set told.first = messages[0].content ~ '\\n\\n' %}
    {%- set told.from = 1 %}
{%- endif %}
{%- for turn in messages %}
    {%- if loop.index0 < told.from %}{% continue %}{% endif %}
    {{- '<start_of_turn>' ~ {'assistant': 'model'}.get(turn.role, turn.role) ~ '\\n' ~ told.first }}
    {{- turn.content.strip() }}{{ '<end_of_turn>\\n' }}
    {%- set told.first = '' %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

LLAMA3 = """{{ bos_token }}
{%- macro turn(role) %}<|start_header_id|>{{ role }}<|end_header_id|>{{ '\\n\\n' }}{% endmacro %}
{%- for said in messages %}{{ turn(said.role) }}{% generation %}{{ said.content.strip() }}<|eot_id|>{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{ turn('assistant') }}{% endif %}"""

LLAMA3_2 = """{{ bos_token }}
{%- macro turn(role) %}<|start_header_id|>{{ role }}<|end_header_id|>{{ '\\n\\n' }}{% endmacro %}
{%- set now = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{%- set has_system = messages[0].role == 'system' %}
{%- set rest = messages[1:] if has_system else messages %}
{{- turn('system') }}{{ 'Environment: ipython\\n' if tools else '' }}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' ~ now ~ '\\n\\n' }}
{{- messages[0].content.strip() if has_system else '' }}<|eot_id|>
{%- for said in rest %}
    {%- if said.tool_calls %}
        {%- set call = said.tool_calls[0].function %}
        {{- turn('assistant') ~ '{"name": "' ~ call.name ~ '", "parameters": ' ~ call.arguments | tojson ~ '}' }}
    {%- elif said.role == 'tool' %}{{ turn('ipython') ~ said.content | tojson }}
    {%- else %}
        {{- turn(said.role) }}
        {%- if loop.first and tools %}
            {{- 'Given the following functions, please respond with a JSON for a function call with its proper ' }}
            {{- 'arguments that best answers the given prompt.\\n\\nRespond in the format {"name": function name, ' }}
            {{- '"parameters": dictionary of argument name and its value}.Do not use variables.\\n\\n' }}
            {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
        {%- endif %}
        {{- said.content.strip() }}
    {%- endif %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}{{ turn('assistant') }}{% endif %}"""

_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{% for tool in tools %}{{ '\\n' ~ tool | tojson }}{% endfor %}{{ '\\n' }}</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
_QWEN = """
{%- for said in messages %}
    {%- if said.role == 'tool' %}
        {{- '' if loop.previtem is defined and loop.previtem.role == 'tool' else '<|im_start|>user' }}
        {{- '\\n<tool_response>\\n' ~ said.content ~ '\\n</tool_response>' }}
        {{- '' if loop.nextitem is defined and loop.nextitem.role == 'tool' else '<|im_end|>\\n' }}
    {%- elif said.role != 'system' or not loop.first %}
        {{- '<|im_start|>' ~ said.role }}BEFORE
        {%- for call in said.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN2_5 = (
    """{%- set default = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}
{{- '<|im_start|>system\\n' ~ (messages[0].content if messages[0].role == 'system' else default) }}
{%- if tools %}{{ '\\n\\n' }}"""
    + _TOOLS
    + "{% endif %}{{ '<|im_end|>\\n' }}"
    + _QWEN.replace("BEFORE", "{{ '\\n' ~ said.content if said.content or not said.tool_calls else '' }}")
)
QWEN3 = (
    """{%- set has_system = messages[0].role == 'system' %}
{%- if has_system or tools %}
    {{- '<|im_start|>system\\n' }}{{ messages[0].content if has_system else '' }}
    {{- '\\n\\n' if has_system and tools else '' }}
    {%- if tools %}"""
    + _TOOLS
    + """{% endif %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(asked=-1) %}
{%- for said in messages %}{% if said.role == 'user' %}{% set last.asked = loop.index0 %}{% endif %}{% endfor %}"""
    + _QWEN.replace(
        "BEFORE",
        """{{ '\\n' }}
        {%- set parts = said.content.split('</think>') %}
        {%- set thought = parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '' %}
        {%- set answer = parts[-1].lstrip('\\n') if parts | length > 1 else said.content %}
        {%- if said.role == 'assistant' and loop.index0 > last.asked and (loop.last or thought) %}
            {{- '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' ~ answer.lstrip('\\n') }}
        {%- else %}{{ answer if said.role == 'assistant' else said.content }}{% endif %}""",
    ).replace("{{- '\\n<tool_call>", "{{- ('\\n' if said.content or not loop.first else '') ~ '<tool_call>")
)
_MISTRAL = """
{%- set told = namespace(first='', from=0) %}
{%- if messages[0].role == 'system' %}
    {%- set told.first = messages[0].content ~ '\\n\\n' %}
    {%- set told.from = 1 %}
{%- endif %}
{%- set rest = messages[told.from:] %}
{%- set asked = rest | selectattr('role', 'equalto', 'user') | list %}
{%- for said in rest %}
    {%- if (loop.index0 is even) != (said.role == 'user') %}
        {{- raise_exception('After the optional system message, conversation roles must alternate ' ~
            'user/assistant/user/assistant/...') }}
    {%- endif %}
{%- endfor %}{{ bos_token }}
{%- for said in rest %}
    {%- if said.role == 'user' %}
        {%- if tools and said == asked[-1] %}[AVAILABLE_TOOLS]SP[
            {%- for tool in tools %}{{ '' if loop.first else ', ' }}{"type": "function", "function": {
                {%- for key, value in tool.function.items() %}
                    {{- ('' if loop.first else ', ') ~ '"' ~ key ~ '": ' }}
                    {{- '"' ~ value ~ '"' if value is string else value | tojson }}
                {%- endfor %}}}
            {%- endfor %}][/AVAILABLE_TOOLS]
        {%- endif %}
        {{- '[INST]SP' ~ (told.first if loop.last else '') ~ said.content ~ '[/INST]' }}
    {%- else %}{{ 'SP' ~ SAID ~ eos_token }}
    {%- endif %}
{%- endfor %}"""
MISTRAL = _MISTRAL.replace("SP", " ").replace("SAID", "said.content.strip()")
MINISTRAL = _MISTRAL.replace("SP", "").replace("SAID", "said.content")

PHI4_MINI = """{% for said in messages %}{{ '<|' ~ said.role ~ '|>' ~ said.content ~ '<|end|>' }}{% endfor %}
{{- '<|assistant|>' if add_generation_prompt else eos_token }}"""
PHI4 = """{%- macro turn(role) %}<|im_start|>{{ role }}<|im_sep|>{% endmacro %}
{%- for said in messages if said.role in ('system', 'user', 'assistant') %}
    {{- turn(said.role) ~ said.content ~ '<|im_end|>' }}
{%- endfor %}{{ turn('assistant') if add_generation_prompt else '' }}"""

OLMO2 = """{{ bos_token }}
{%- for said in messages %}
    {{- '<|' ~ said.role ~ '|>\\n' ~ said.content ~ (eos_token if said.role == 'assistant' else '') }}
    {{- '' if loop.last and said.role == 'assistant' else '\\n' }}
{%- endfor %}{{ '<|assistant|>\\n' if add_generation_prompt else '' }}"""
OLMO3 = """
{%- if 'system' not in messages | map(attribute='role') %}<|im_start|>system
You are Olmo, a helpful AI assistant built by Ai2. Your date cutoff is December 2024, and your model weights are {#-
#} available at https://huggingface.co/allenai.<|im_end|>{{ '\\n' }}
{%- endif %}
{%- for said in messages %}
    {{- '<|im_start|>' ~ said.role ~ '\\n' ~ said.content }}
    {%- if said.role == 'system' %} You do not currently have access to any functions. <functions></functions>
    {%- endif %}
    {{- eos_token if loop.last and said.role == 'assistant' else '<|im_end|>\\n' }}
{%- endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"""

GRANITE3 = """{%- macro turn(role) %}<|start_of_role|>{{ role }}<|end_of_role|>{% endmacro %}
{%- if messages[0].role != 'system' %}
    {{- turn('system') ~ strftime_now('%B %d, %Y') ~ '<|end_of_text|>\\n' }}
{%- endif %}
{%- for said in messages %}
    {{- turn(said.role) ~ said.content ~ '<|end_of_text|>\\n' }}
    {%- if tools and loop.first %}
        {{- turn('available_tools') ~ tools | tojson(indent=4) ~ '<|end_of_text|>\\n' }}
    {%- endif %}
{%- endfor %}{{ turn('assistant') if add_generation_prompt else '' }}"""

GEMMA4_E2B = """{{ bos_token }}
{%- macro answer(text) %}
    {%- for part in text.split('<channel|>') %}{{ part.split('<|channel>')[0] }}{% endfor %}
{%- endmacro %}
{%- for said in messages %}
    {{- '<|turn>' ~ {'assistant': 'model'}.get(said.role, said.role) ~ '\\n' }}
    {{- (answer(said.content) if said.role == 'assistant' else said.content) | trim ~ '<turn|>\\n' }}
{%- endfor %}{{ '<|turn>model\\n' if add_generation_prompt else '' }}"""
GEMMA4_31B = GEMMA4_E2B.replace("model\\n' if", "model\\n<|channel>thought\\n<channel|>' if")

NEWER = {
    "mistral": MISTRAL,
    "ministral": MINISTRAL,
    "phi4_mini": PHI4_MINI,
    "phi4": PHI4,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "granite3": GRANITE3,
    "gemma4_e2b": GEMMA4_E2B,
    "gemma4_31b": GEMMA4_31B,
}
"""Those of the families that derive from others; Gemma 1 has Gemma 2's."""
OWN = {
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "llama3": LLAMA3,
    "llama3_2": LLAMA3_2,
    "qwen2_5": QWEN2_5,
    "qwen3": QWEN3,
}
"""By the names of tests/trainer/fixtures/own_templates.json."""
