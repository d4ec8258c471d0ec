"""Chat templates in the forms of published models, written for these tests, and templates that are hostile."""

_CHATML_TURN = "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
_CHATML_ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_LOOP = "{% for message in messages %}"
_LLAMA3_TURN = (
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
)
_LLAMA3_ASK = "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
_GEMMA_LOOP = r"""
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles must alternate: user, assistant, user, assistant") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + CONTENT + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
_TOOLS_JSON = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\nSignatures are in <tools></tools>:\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- else %}DEFAULT{%- endif %}"""
_TOOL_TURNS = r"""
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
_VISION_TURN = r"""{{ message['role'].upper() + ': ' }}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"""
_MISTRAL_CHECK = r"""
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for m in turns %}
    {%- if m.role in ['user', 'assistant'] and m.tool_calls is not defined %}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('Roles must alternate') }}{%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}"""
_THINK_SPLIT = r"""
{%- set ns = namespace(multi_step=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string
        and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}
        {{- '<|im_end|>\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
_LLAMA31_HEAD = (
    r"""{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}DATE{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if builtin_tools is defined or tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{{- "Cutting Knowledge Date: December 2023\nToday Date: " + date_string + "\n\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {%- else %}{{- raise_exception("Cannot put tools in the first user message when there is none") }}{%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nUse these functions.\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("Only single tool-calls") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}"""
    + _LLAMA3_ASK
)
_GENERATED = "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"

# Written in the forms of published models.
TEMPLATES: dict[str, str] = {
    "llama2": r"""
{%- if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}
{%- else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Roles must alternate') }}{% endif %}
    {%- if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' +
        message['content'] %}
    {%- else %}{% set content = message['content'] %}{% endif %}
    {%- if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}""",
    "llama3": f"{{% set loop_messages = messages %}}{_LOOP}{{% if loop.index0 == 0 %}}{{{{ bos_token }}}}{{% endif %}}"
    f"{_LLAMA3_TURN}{{% endfor %}}{_LLAMA3_ASK}",
    "llama31": _LLAMA31_HEAD.replace("DATE", '{%- set date_string = "26 Jul 2024" %}'),
    "llama32": _LLAMA31_HEAD.replace(
        "DATE",
        '{%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}'
        '{%- set date_string = "26 Jul 2024" %}{%- endif %}',
    ),
    "llama32_tools_in_system": _LLAMA31_HEAD.replace(
        "set tools_in_user_message = true", "set tools_in_user_message = false"
    ).replace("DATE", '{%- set date_string = strftime_now("%d %B %Y") %}'),
    "llama32_vision": r"""{{- bos_token }}
{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- if message['content'] is string %}{{- message['content'] }}
    {%- else %}{%- for content in message['content'] %}
        {%- if content['type'] == 'image' %}{{- '<|image|>' }}
        {%- elif content['type'] == 'text' %}{{- content['text'] }}{%- endif %}{%- endfor %}
    {%- endif %}{{- '<|eot_id|>' }}
{%- endfor %}"""
    + _LLAMA3_ASK,
    "chatml": f"{_LOOP}{_CHATML_TURN}{{% endfor %}}{_CHATML_ASK}",
    "qwen15": f"{_LOOP}{{% if loop.first and messages[0]['role'] != 'system' %}}{{{{ '<|im_start|>system\n"
    f"You are a helpful assistant<|im_end|>\n' }}}}{{% endif %}}{_CHATML_TURN}{{% endfor %}}{_CHATML_ASK}",
    "qwen2": f"{_LOOP}{{% if loop.first and message.role != 'system' %}}{{{{ '<|im_start|>system\nYou are kind."
    f"<|im_end|>\n' }}}}{{% endif %}}{_CHATML_TURN}{{% endfor %}}{_CHATML_ASK}",
    "qwen2_vl": r"""{% set image_count = namespace(value=0) %}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}
{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}
{% set image_count.value = image_count.value + 1 %}
{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "qwen25": _TOOLS_JSON.replace("DEFAULT", "{{- '<|im_start|>system\\nYou are Q.<|im_end|>\\n' }}") + _TOOL_TURNS,
    "qwen3": _THINK_SPLIT,
    "qwen3_tools": _TOOLS_JSON.replace("DEFAULT", "") + _TOOL_TURNS,
    "qwen3_no_thoughts": _THINK_SPLIT.replace("enable_thinking is defined and enable_thinking is false", "true"),
    "gemma1": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}"
    "{% endif %}" + _GEMMA_LOOP.replace("CONTENT", "message['content'] | trim"),
    "gemma2": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system') }}{% endif %}"
    + _GEMMA_LOOP.replace("CONTENT", "(message['content'] | string | trim)"),
    "gemma3": r"""{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("Must alternate") }}{%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}
    {%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}""",
    "mistral_v1": r"""{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}""",
    "mistral_v3": _MISTRAL_CHECK
    + r"""{{- bos_token }}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and loop.last %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + m.content + '[/INST]' }}
        {%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{%- endif %}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}{%- set out = call.function | tojson %}{{- out[:-1] }}
            {%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('IDs have 9 characters') }}
            {%- endif %}{{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
    {%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] {"content": ' + m.content | string + '}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only user and assistant roles are supported') }}{%- endif %}
{%- endfor %}""",
    "mistral_nemo": _MISTRAL_CHECK
    + r"""{{- bos_token }}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if tools and m == users[-1] %}{{- '[AVAILABLE_TOOLS][' }}
            {%- for tool in tools %}{{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != 'return' %}
                    {%- if value is string %}{{- '"' + key + '": "' + value + '"' }}
                    {%- else %}{{- '"' + key + '": ' + value | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ', ' }}{%- endif %}
                {%- endfor %}{{- '}}' }}{{- ', ' if not loop.last else '][/AVAILABLE_TOOLS]' }}
            {%- endfor %}
        {%- endif %}
        {{- '[INST]' + (system + '\n\n' if loop.last and system is defined else '') + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' and not m.tool_calls %}{{- m.content + eos_token }}{%- endif %}
{%- endfor %}""",
    "mistral_small": r"""{%- set today = strftime_now("%Y-%m-%d") %}{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{%- set told = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}{%- set told = 'You are M.\nThe current date is ' + today + '.' %}{%- set rest = messages %}{%- endif %}
{{- '[SYSTEM_PROMPT]' + told + '[/SYSTEM_PROMPT]' }}
{%- for message in rest %}
    {%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}
    {%- else %}{{- raise_exception('Only user, system and assistant roles are supported!') }}{%- endif %}
{%- endfor %}""",
    "mixtral": r"""{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
{{ ' [INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}
{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "phi3": "{{ bos_token }}" + _LOOP + "{% if message['role'] in ['user', 'system', 'assistant'] %}"
    "{{ '<|' + message['role'] + '|>' + '\n' + message['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "phi35": "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
    "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
    "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "phi4": "{% for message in messages %}{% if (message['role'] == 'system') %}{{'<|im_start|>system<|im_sep|>' + "
    "message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}{{'<|im_start|>user<|im_sep|>' + "
    "message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'assistant') %}"
    "{{'<|im_start|>assistant<|im_sep|>' + "
    "message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
    "phi4_mini": "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and "
    "message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + "
    "message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + "
    "'<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}"
    "{{ eos_token }}{% endif %}",
    "smollm": f"{_LOOP}{_CHATML_TURN}{{% endfor %}}{_CHATML_ASK}".replace("+ '\\n' }}", "}}\n"),
    "smollm2": f"{_LOOP}{{% if loop.first and messages[0]['role'] != 'system' %}}{{{{ '<|im_start|>system\nYou are Smol"
    f"<|im_end|>\n' }}}}{{% endif %}}{_CHATML_TURN}{{% endfor %}}{_CHATML_ASK}",
    "smollm3": r"""{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}
{%- set mode = '/think' if enable_thinking else '/no_think' %}
{%- if messages[0].role == 'system' %}{%- set told = messages[0].content %}
    {%- if '/no_think' in told %}{%- set mode = '/no_think' %}{%- endif %}
    {%- set told = told.replace('/no_think', '').replace('/think', '').rstrip() %}
{%- endif %}

{{- '<|im_start|>system\n## Metadata\n\nToday Date: ' + strftime_now('%d %B %Y') + '\nReasoning Mode: ' }}
{{- mode + '\n\n' }}
{%- if told %}{{- '## Custom Instructions\n\n' + told + '\n\n' }}{%- endif %}{{- '<|im_end|>\n' }}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}
        {%- if mode == '/think' %}{{ '<|im_start|>assistant\n' + content.lstrip('\n') + '<|im_end|>\n' }}
        {%- else %}
        {{ '<|im_start|>assistant\n<think>\n\n</think>\n' + content.lstrip('\n') + '<|im_end|>\n' }}{%- endif %}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}""",
    "hermes": r"""{%- macro json_to_type(json_spec) %}
{%- if json_spec.type == "string" %}{{- "str" }}{%- elif json_spec.type == "integer" %}{{- "int" }}
{%- elif json_spec.type == "array" %}{{- "list[" + json_to_type(json_spec['items']) + "]" }}
{%- else %}{{- "Any" }}{%- endif %}{%- endmacro %}
{{- bos_token }}{{- '<|im_start|>system\n' }}
{%- for tool in tools or [] %}{%- set tool = tool.function or tool %}
    {{- tool.name + '(' }}{%- for name, spec in tool.parameters.properties | dictsort %}
        {{- name + ': ' + json_to_type(spec) }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ')\n' }}
{%- endfor %}{{- '<|im_end|>\n' }}"""
    + _TOOL_TURNS,
    "zephyr": "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + "
    "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
    "vicuna": "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + ' ' }}"
    "{% set messages = messages[1:] %}"
    "{% else %}{{ 'A chat between a curious user and an assistant. ' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}{% else %}"
    "{{ 'ASSISTANT: ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
    "alpaca": r"""{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim + '\n\n' %}
{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{{ bos_token + system }}
{% for message in messages %}{% if message['role'] == 'user' %}
{{ '### Instruction:\n' + message['content'] | trim + '\n\n' }}{% elif message['role'] == 'assistant' %}
{{ '### Response:\n' + message['content'] | trim + eos_token + '\n\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt and messages[-1]['role'] == 'user' %}{{ '### Response:\n' }}{% endif %}""",
    "deepseek_llm": "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + "
    "'\n\n' }}{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    "deepseek_r1": r"""{% set ns = namespace(is_first=false, is_tool=false, system_prompt='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}
{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}
    {{ '<｜User｜>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}
    {{ '<｜tool▁output｜>' + message['content'] }}{%- endif %}
{%- endfor -%}
{% if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜><think>\n' }}{% endif %}""",
    "command_r": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% if system_message != false %}"
    "{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}{% endif %}"
    "{% for message in loop_messages %}{% set content = message['content'] %}{% if message['role'] == 'user' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + content.strip() + "
    "'<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
    "command_r_documents": r"""{{ bos_token }}{% for document in documents or [] %}Document: {{ loop.index0 }}
{% for key, value in document.items() %}{{ key | title }}: {{ value }}
{% endfor %}{% endfor %}{% for message in messages %}{{ message.role | upper }}: {{ message.content }}
{% endfor %}""",
    "llava15": "{% for message in messages %}" + _VISION_TURN + "{% for part in message['content'] | "
    "selectattr('type', 'equalto', 'text') %}{% if message['role'] != 'assistant' %}{{ part['text'] + ' ' }}{% else %}"
    "{% generation %}{{ part['text'] + ' ' }}{% endgeneration %}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
    "llava_interleave": "{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\n' + content['text'] }}"
    "{% endfor %}{{'<|im_end|>'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llava_next": "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'][0]['text'] }}"
    "{% elif message['role'] == 'user' %}{{ '[INST] ' }}{% for c in message['content'] %}{% if c['type'] == 'image' %}"
    "{{ '<image>\n' }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}{{ ' [/INST]' }}{% else %}"
    "{{ ' ' + message['content'][0]['text'] + '</s>' }}{% endif %}{% endfor %}",
    "smolvlm": "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]"
    "['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}"
    "{% if line['type'] == 'text' %}{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    "idefics2": "{% for message in messages %}{{message['role'].capitalize()}}{% if message['content'] and message"
    "['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}"
    "{% if line['type'] == 'text' %}{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    "olmo": "{{ eos_token }}{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + "
    "message['content'] }}\n{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + "
    "eos_token }}\n{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n"
    "{% endif %}\n{% endfor %}",
    "olmo2": "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\n' + "
    "message['content'] + '\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '\n' }}"
    "{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>\n'  + message['content'] + "
    "eos_token + '\n' }}{% else %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
    "granite": r"""{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}{%- set system_message = "Today's Date: " + strftime_now('%B %d, %Y') + ".\nYou are G." %}
    {%- if tools and documents %}{%- set system_message = system_message + " Tools and documents." %}
    {%- elif tools %}{%- set system_message = system_message + " Tools." %}{%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\n' }}
{%- if tools %}{{- '<|start_of_role|>tools<|end_of_role|>' }}{{- tools | tojson(indent=4) }}{{- '<|end_of_text|>\n' }}
{%- endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}
    {%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}
{%- endfor %}""",
    "falcon": "{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}"
    "{% if message['role'] == 'system' %}"
    "{{ 'System: ' }}{% elif message['role'] == 'user' %}{{ 'User: ' }}{% elif message['role'] == 'assistant' %}"
    "{{ 'Falcon: ' }}{% endif %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '\n' + 'Falcon:' }}{% endif %}",
    "falcon3": "{%- if tools %}{{- '<|system|>\n' }}{%- for tool in tools %}"
    "{{- tool | tojson(indent=2, sort_keys=true) }}"
    "{%- endfor %}{%- endif %}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% if not loop.last %}"
    "{{ '<|assistant|>\n' + message['content'] + eos_token + '\n' }}{% else %}"
    "{{ '<|assistant|>\n' + message['content'] + "
    "eos_token }}{% endif %}{% else %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
    "openchat": "{{ bos_token }}{% for message in messages %}{{ 'GPT4 Correct ' + message['role'].title() + ': ' + "
    "message['content'] + '<|end_of_turn|>'}}{% endfor %}{% if add_generation_prompt %}{{ 'GPT4 Correct Assistant:' }}"
    "{% endif %}",
    "solar": "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '### System:\n' + message['content'] + "
    "'\n\n' }}{% elif message['role'] == 'user' %}{{ '### User:\n' + message['content'] + '\n\n' }}{% else %}"
    "{{ '### Assistant:\n' + message['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}",
    "yi": "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    + _LOOP
    + "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    + _CHATML_ASK,
    "chatml_generation": _LOOP
    + "{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    + _GENERATED
    + "{{ '\n' }}{% else %}"
    + _CHATML_TURN
    + "{% endif %}{% endfor %}"
    + _CHATML_ASK,
    "llama3_generation": "{{ bos_token }}"
    + _LOOP
    + "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{% if message.role == 'assistant' %}{%- generation -%}{{ message['content'] | trim }}<|eot_id|>"
    "{%- endgeneration -%}"
    "{% else %}{{ message['content'] | trim }}<|eot_id|>{% endif %}{% endfor %}" + _LLAMA3_ASK,
    "first_answer_only": r"""{% for message in messages %}{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{% endgeneration %}
{% break %}{% endif %}{% if message.role == 'system' %}{% continue %}{% endif %}
{{ message.role ~ ': ' ~ message.content }}
{% endfor %}""",
    "macros": r"""{% macro turn(role, text, end='\n') -%}
[{{ role | upper }}] {{ text | replace('\n', ' / ') | truncate(60) }}{{ end }}
{%- endmacro %}
{% set roles = dict(user='human', assistant='bot') %}
{% for message in messages %}{{ turn(roles.get(message.role, message.role), message.content) }}{% endfor %}
{% filter lower %}LAST{% endfilter %}{{ messages | map(attribute='role') | join(',') }}
{{- messages | groupby('role') | map('first') | list | length }}{{ '%s of %d' | format('turn', messages | length) }}
{% call(x) turn.__call__ if false else turn('a', 'b') %}{{ x }}{% endcall %}""".replace(
        "{% call(x) turn.__call__ if false else turn('a', 'b') %}{{ x }}{% endcall %}", ""
    ),
    "dates": "{{ strftime_now('%A %d %B %Y, week %V') }}{# a comment #}{{ messages | tojson(separators=(',', ':')) }}",
    "recursive": "{% for item in messages recursive %}{{ loop.depth }}{{ item.role }}:{% if item.content is string %}"
    "{{ item.content | wordcount }}{% else %}{{ item.content | length }}{% endif %};{% endfor %}",
}

# Each is refused for the reason on its right.
HOSTILE = {
    "endless loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "CPU time"),
    "a huge power": ("{{ 9 ** (9 ** 9) }}", "CPU time"),
    "powers of powers": (
        "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "CPU time|MB",
    ),
    "a long text searched": ("{{ ('a' * 5000000) | urlize | wordwrap(1) | length }}", "CPU time|MB"),
    "replacements that grow": ("{{ ('a' * 4000000) | replace('a', 'b' * 300) }}", "MB"),
    "a huge text": ("{{ 'a' * 10 ** 9 }}", "MB"),
    "a huge list": ("{{ [0] * 10 ** 9 }}", "MB"),
    "a text that doubles": (
        "{% set n = namespace(t='a') %}{% for i in range(40) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}",
        "MB",
    ),
    "a wide format": ("{{ '%2000000000d' % 1 }}", "MB"),
    "a wide new format": ("{{ '{:>2000000000}'.format(1) }}", "MB"),
    "a wide centre": ("{{ 'a' | center(2000000000) }}", "MB"),
    "a deep indent": ("{{ ('a\n' * 20000) | indent(20000) }}", "MB"),
    # Which limit is met first depends on the processor.
    "a long list as text": (
        "{{ ['a' * 100000] * 10000 | int | abs | default(1) | string | int }}",
        "CPU time|MB|characters",
    ),
    "a text that is joined": ("{{ (['a' * 100000] * 10000) | join }}", "MB"),
    "a long output": ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "writes more than"),
    "many outputs": ("{{ ('a' * 4000000) }}{{ ('b' * 4000000) }}", "writes more than"),
    "a huge range": ("{% for i in range(10 ** 12) %}{% endfor %}", "Range too big|OverflowError"),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses too deeply"),
    "a loop that calls itself": (
        "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        "recurses too deeply|depth",
    ),
    "deep parentheses": ("{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}", "recurses too deeply"),
    "deep blocks": ("{% if 1 %}" * 2000 + "{% endif %}" * 2000, "recurses too deeply|nested|SyntaxError"),
    "a class": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "a class by name": ("{{ ''['__class__'] }}{{ (''|attr('__class__')).x }}", "unsafe|undefined"),
    "the globals of a macro": ("{% macro f() %}{% endmacro %}{{ f.__func__.__globals__ }}", "no attribute"),
    "the globals of a function": ("{{ raise_exception.__globals__['sys'] }}", "unsafe"),
    "the globals of a cycler": ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe|undefined"),
    "a format of attributes": ("{{ '{0.__class__.__init__.x}'.format(messages) }}", "unsafe|no attribute"),
    "a namespace of internals": ("{{ namespace(__class__=1) }}", "cannot have the name"),
    "a change of the messages": ("{{ messages.append(1) }}", "unsafe"),
    "a deletion": ("{{ messages[0].clear() }}", "unsafe"),
    "another file": ("{% include '/etc/passwd' %}", "no loader"),
    "an import": ("{% import 'os' as os %}{{ os }}", "no loader"),
    "a parent": ("{% extends '/etc/passwd' %}", "no loader"),
    "a syntax error": ("{% for m in messages %}", "syntax error"),
    "an unknown tag": ("{% exec 'id' %}", "syntax error"),
    "half of a pair": (r"{{ '\ud800' }}", "surrogate"),
    "a long template": ("a" * 70_000, "70,000 characters; the maximum"),
}
