"""Every format of calls, an answer of two calls as it writes them, and what its grammar permits."""

from gptmanager import GuidedDecoding
from gptmanager.callbacks.answers.call_grammar import marks_of
from gptmanager.callbacks.answers.tool_formats.deepseek import TAGS as DEEPSEEK
from gptmanager.callbacks.answers.tool_formats.formats import format_of
from gptmanager.server.chat.tools import read_tools

LOOK = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "unit": {"$ref": "#/$defs/Unit"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["C", "F"]}},
}
LISTED = [
    {"type": "function", "function": {"name": "look", "parameters": LOOK}},
    {"type": "function", "function": {"name": "stop"}},
]
TOOLS = read_tools(LISTED, "auto")
BEGIN_ALL, END_ALL, BEGIN, END, SEPARATOR = DEEPSEEK
MADE = {
    "hermes": format_of("hermes", ""),
    "llama3": format_of("llama3", ""),
    "mistral": format_of("mistral", ""),
    "mistral tags": format_of("mistral", "[ARGS]"),
    "qwen3_coder": format_of("qwen3_coder", ""),
    "seed_oss": format_of("seed_oss", ""),
    "minimax_m2": format_of("minimax_m2", ""),
    "glm45": format_of("glm45", ""),
    "glm45 of 4.7": format_of("glm45", "</arg_key><arg_value>"),
    "granite": format_of("json_list", ""),
    "nemotron": format_of("json_list", "<TOOLCALL>["),
    "apriel": format_of("json_list", "<tool_calls>["),
    "minimax_m1": format_of("json_list", '<tool_calls>\\n{"name":'),
    "gigachat": format_of("json_list", "<|function_call|>"),
    "gigachat 3": format_of("json_list", "<|role_sep|> 'function call'"),
    "cohere": format_of("cohere", ""),
    "command r+": format_of("cohere", "Action:\\n```json\\n["),
    "apertus": format_of("apertus", ""),
    "functionary": format_of("functionary", ""),
    "kimi_k2": format_of("kimi_k2", ""),
    "solar_open": format_of("solar_open", ""),
    "minicpm5": format_of("minicpm5", ""),
    "hy3": format_of("hy3", ""),
    "functiongemma": format_of("functiongemma", ""),
    "deepseek_v32": format_of("deepseek_v32", ""),
    "deepseek v4": format_of("deepseek_v32", "tool_calls>"),
    "gemma4": format_of("gemma4", ""),
    "lfm2": format_of("lfm2", ""),
    "olmo3": format_of("olmo3", ""),
    "deepseek": format_of("deepseek", "```json"),
    "deepseek v3.1": format_of("deepseek", ""),
    "pythonic": format_of("pythonic", ""),
    "harmony": format_of("harmony", ""),
}
ROME = '{"city": "Rome", "days": 2}'
QWEN = (
    "<function=look>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>"
)
GLM = (
    "<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
)
DSML = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n'  # noqa: RUF001
    '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'  # noqa: RUF001
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'  # noqa: RUF001
    '</｜DSML｜invoke>\n<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>\n'  # noqa: RUF001
    "</｜DSML｜function_calls>"  # noqa: RUF001
)
LIST = '{"name": "look", "arguments": %s}, {"name": "stop", "arguments": {}}' % ROME
QWEN_STOP = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
GIGA = "<|message_sep|>\n\nfunction call<|role_sep|>\n"
CALLS = [["look", ROME], ["stop", "{}"]]
TWO = {  # two calls, as each format writes them, after a text if it may have one
    "hermes": 'Hm.\n<tool_call>\n{"name": "look", "arguments": %s}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>' % ROME,
    "llama3": f'{{"name": "look", "parameters": {ROME}}}; {{"name": "stop", "parameters": {{}}}}',
    "mistral": 'Hm.[TOOL_CALLS] [{"name": "look", "arguments": %s}, '
    '{"name": "stop", "arguments": {}}]' % ROME,
    "mistral tags": f"Hm.[TOOL_CALLS]look[ARGS]{ROME}[TOOL_CALLS]stop[CALL_ID]123456789[ARGS]{{}}",
    "qwen3_coder": f"Hm.\n<tool_call>\n{QWEN}\n</tool_call>\n{QWEN_STOP}",
    "deepseek": f"Hm.{BEGIN_ALL}{BEGIN}function{SEPARATOR}look\n```json\n{ROME}\n```{END}\n"
    f"{BEGIN}function{SEPARATOR}stop\n```json\n{{}}\n```{END}{END_ALL}",
    "deepseek v3.1": f"Hm.{BEGIN_ALL}{BEGIN}look{SEPARATOR}{ROME}{END}{BEGIN}stop{SEPARATOR}{{}}"
    f"{END}{END_ALL}",
    "pythonic": "[look(city='Rome', days=2), stop()]",
    "lfm2": "Hm.<|tool_call_start|>[look(city='Rome', days=2), stop()]<|tool_call_end|>",
    "olmo3": "Hm.<function_calls>look(city='Rome', days=2)\nstop()</function_calls>",
    "gemma4": 'Hm.<|tool_call>call:look{city:<|"|>Rome<|"|>,days:2}<tool_call|>'
    "<|tool_call>call:stop{}<tool_call|>",
    "granite": f"Hm.<|tool_call|>[{LIST}]",
    "nemotron": f"Hm.<TOOLCALL>[{LIST}]</TOOLCALL>",
    "apriel": f"Hm.\n<tool_calls>[{LIST}]</tool_calls>",
    "cohere": 'Hm.<|START_ACTION|>[\n    {"tool_name": "look", "parameters": %s},\n'
    '    {"tool_name": "stop", "parameters": {}}\n]<|END_ACTION|>' % ROME,
    "command r+": 'Hm.\nAction:\n```json\n[\n    {"tool_name": "look", "parameters": %s},\n'
    '    {"tool_name": "stop", "parameters": {}}\n]```' % ROME,
    "minimax_m1": "Hm.\n<tool_calls>\n%s\n</tool_calls>" % LIST.replace("}, {", "}\n{"),
    "gigachat": "Hm.<|function_call|>" + LIST.replace("}, {", "}<|function_call|>{"),
    "gigachat 3": f"Hm.{GIGA}" + LIST.replace("}, {", f"}}{GIGA}{{"),
    "apertus": f'Hm.<|tools_prefix|>[{{"look": {ROME}}}, {{"stop": {{}}}}]<|tools_suffix|>',
    "functionary": f"Hm.<function=look>{ROME}</function><function=stop>{{}}</function>",
    "kimi_k2": "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
    f"<|tool_call_argument_begin|>{ROME}<|tool_call_end|><|tool_call_begin|>functions.stop:1"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "solar_open": "Hm.<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>look"
    f"<|tool_call:args|>{ROME}<|tool_call:end|><|tool_call:begin|>f6g7h8i9j0<|tool_call:name|>stop"
    "<|tool_call:args|>{}<|tool_call:end|><|calls|>",
    "minicpm5": 'Hm.\n<function name="look"><param name="city">Rome</param><param name="days">2'
    '</param></function>\n<function name="stop"></function>',
    "hy3": f"Hm.<tool_calls>\n<tool_call>look<tool_sep>\n{GLM}</tool_call>\n<tool_call>stop"
    "<tool_sep>\n</tool_call>\n</tool_calls>".replace(">", ":opensource>"),
    "functiongemma": "Hm.<start_function_call>call:look{city:<escape>Rome<escape>,days:2}"
    "<end_function_call><start_function_call>call:stop{}<end_function_call>",
    "deepseek_v32": f"Hm.{DSML}",
    "deepseek v4": f"Hm.{DSML.replace('function_calls', 'tool_calls')}",
    "seed_oss": "Hm.\n<seed:tool_call>\n<function=look>\n<parameter=city>Rome</parameter>\n"
    "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n"
    "<function=stop>\n</function>\n</seed:tool_call>",
    "minimax_m2": 'Hm.\n<minimax:tool_call>\n<invoke name="look">\n'
    '<parameter name="city">Rome</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n'
    '<invoke name="stop">\n</invoke>\n</minimax:tool_call>',
    "glm45": f"Hm.\n<tool_call>look\n{GLM}</tool_call>\n<tool_call>stop\n</tool_call>",
    "glm45 of 4.7": f"Hm.<tool_call>look{GLM}</tool_call>\n<tool_call>stop</tool_call>".replace(
        ">\n<arg_", "><arg_").replace(">\n</tool", "></tool"),
    "harmony": f"<|channel|>final<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.look <|constrain|>json<|message|>{ROME}<|end|><|start|>assistant<|channel|>"
    "commentary to=functions.stop <|message|>{}<|call|>",
}  # fmt: skip


def fits_of(tokenizer):
    """A function that tells how far a text is one of a grammar: "yes", "begins one", or the part
    that fits.
    """
    marks, guided = marks_of(tokenizer, [0, 1]), GuidedDecoding(tokenizer, [0])

    def fits(form, tools, text, answer=None):
        grammar, schemas = form.grammar(tools, marks, answer)
        matcher = guided.lark(grammar, schemas=schemas).prepare("cpu").result(30).deep_copy()
        ids = tokenizer.encode(text).ids
        taken = matcher.try_consume_tokens(ids)
        if taken < len(ids):
            return tokenizer.decode(ids[:taken], skip_special_tokens=False)
        return "yes" if matcher.is_accepting() else "begins one"

    return fits
