"""The table of runs on a terminal: what stays where there is no room for all of it."""

from controller.records.table import flat, format_table


def test_in_80_columns_the_table_keeps_hash_state_and_overrides() -> None:
    rows = [
        {"run": f"quickstart-{11 * i:08x}", "state": "finished", "created": 1.7e9, "seconds": 238.2,
         "type": "v5litepod-16", "attempts": 1, "usd": 1.25, "name": "quickstart",
         "metrics": {"accuracy_before": 0.488, "accuracy_after": 0.898, "accuracy_low_after": 0.8, "eval_prompts": 256},
         "overrides": ["+experiment=quickstart", f"optimizer.lr={lr}", f"run.seed={i}"]}
        for i, lr in enumerate(("0.0001", "0.0007"))
    ]  # fmt: skip
    wide, narrow = format_table([flat(row) for row in rows]), format_table([flat(row) for row in rows], 80)
    assert max(map(len, narrow)) <= 80
    assert narrow[2].split()[:2] == ["0000000b", "finished"]
    assert narrow[2].endswith("lr=0.0007 seed=1")
    assert narrow[-1].startswith("not shown: type, attempts")
    assert wide[2].startswith("quickstart-0000000b  finished")
    assert "eval_prompts" not in wide[0]
    assert "accuracy_after" in wide[0]


def test_metrics_stay_where_overrides_can_be_folded_and_a_command_reads_as_it_was_typed() -> None:
    command = [
        "program=command",
        "program.command=[python,train.py,--steps,20]",
        "tpu=v5litepod_8",
        "env.packages=image",
    ]
    row = {
        "run": "run-0000000b",
        "state": "finished",
        "created": 1.0,
        "seconds": 9.0,
        "attempts": 1,
        "type": "v5litepod-8",
    }
    narrow = format_table([flat({**row, "metrics": {"final_loss": 0.25}, "overrides": command})], 80)
    assert "final_loss" in narrow[0]
    text = " ".join(" ".join(line[line.find("python") if at == 1 else 0 :].split()) for at, line in enumerate(narrow))
    assert "python train.py --steps 20" in text
    assert max(map(len, narrow)) <= 80
    quoted = flat({**row, "overrides": ["program.command=[sh,-c,'a, b']"]})
    assert "'a, b'" in " ".join(format_table([quoted])).replace("'\"'\"'", "'")
