"""lm-eval: a task of sums over chat completions, and likelihoods over completions."""

import json
import os
import tempfile
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

URL, CHAT = os.environ["TOKENMESH_URL"], os.environ["CHAT_MODEL"]
SUMS = [{"question": f"What is {a} + 45?", "answer": f"{a} + 45 = {a + 45}"} for a in (27, 31)]
STORY = "Once upon a time a small token lived in a"
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{question}"
doc_to_target: {target}
output_type: {kind}
{more}
"""
GENERATE = """
generation_kwargs: {until: ["\\n"], max_gen_toks: 32}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSE = """
doc_to_choice: ["mesh", "zqxj"]
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""

with tempfile.TemporaryDirectory() as folder:
    data = Path(folder) / "sums.jsonl"
    data.write_text("\n".join(json.dumps(each) for each in SUMS))
    for name, question, target, kind, more in (
        ("sums", "{{question}}", '"{{answer}}"', "generate_until", GENERATE),
        ("choices", STORY, "0", "multiple_choice", CHOOSE),
    ):
        text = TASK.format(
            name=name, data=data, question=question, target=target, kind=kind, more=more
        )
        (Path(folder) / f"{name}.yaml").write_text(text)
    tasks = TaskManager(include_path=folder, include_defaults=False)
    chat = simple_evaluate(
        "local-chat-completions",
        model_args={"model": CHAT, "base_url": f"{URL}/v1/chat/completions"},
        tasks=["sums"],
        task_manager=tasks,
        apply_chat_template=True,
    )
    assert chat["results"]["sums"]["exact_match,none"] == 1.0, chat["results"]
    chosen = simple_evaluate(
        "local-completions",
        model_args={
            "model": CHAT,
            "base_url": f"{URL}/v1/completions",
            "tokenizer": os.environ["CHAT_TOKENIZER"],
        },
        tasks=["choices"],
        task_manager=tasks,
    )
    assert chosen["results"]["choices"]["acc,none"] == 1.0, chosen["results"]
