"""`rpc-pipe generate`, and generation by processes: what is printed, and what is left when it fails."""

import json
import re
import sys

import pytest
import torch
from processes import rpc_pipe

from rpc_pipe import Pipeline, Training
from rpc_pipe.commands import generate as command
from rpc_pipe.commands import own_generate
from rpc_pipe.commands.main import main
from rpc_pipe.launching import launcher_link
from rpc_pipe.model.user_model import load_user_model

pytest.importorskip("transformers")
PROMPTS = "Hello", "A longer one"
MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = dict(vocab_size=256, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=2)


class tokenizer:
    encode = staticmethod(lambda text: [*text.encode()])
    decode = staticmethod(lambda tokens: bytes(tokens).decode("latin-1"))


def make():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=64, initializer_range=0.3, pad_token_id=0))
    ids = torch.randint(3, 256, (4, 8))
    return model, {"input_ids": ids, "labels": ids}
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "its_model.py").write_text(MODEL)
    (tmp_path / "numbers.py").write_text(MODEL.replace("class tokenizer", "class other"))
    return tmp_path / "its_model.py"


@pytest.fixture
def generate(monkeypatch, capsys):
    """Run the command in this process; return the exit code, the result, what was shown, and the error."""
    told = []

    def start(typed, *rest):
        monkeypatch.setattr(sys, "argv", [typed["script"], *typed["arguments"]])
        own_generate.main()
        return 0

    def run(*typed):
        told.clear()
        code = main(["generate", *map(str, typed)])
        shown = "".join(message["text"] for message in told)
        return code, told[-1].get("json") if told else None, shown, capsys.readouterr().err

    monkeypatch.setattr(command, "start_script", start)
    monkeypatch.setattr(launcher_link, "tell", lambda **message: told.append(message))
    return run


def test_texts_are_those_of_one_process_by_weights_of_a_checkpoint(model, tmp_path, generate):
    made = load_user_model(f"{model}:make")
    pipe = Pipeline(
        made.model, training=Training(torch.optim.SGD), num_microbatches=2, num_workers=2, example=made.batch
    )
    pipe.step(made.batch)
    pipe.checkpoints.save(tmp_path / "kept")
    plain = load_user_model(f"{model}:make").model
    plain.load_state_dict(pipe.weights.state_dict())
    wanted = []
    for prompt in PROMPTS:
        ids = torch.tensor([[*prompt.encode()]])
        wanted.append(plain.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist())
    kept = "--weights", tmp_path / "kept", "--max-new-tokens", 6
    (tmp_path / "prompts").write_text("Hello\n\nA longer one\n")
    shown = "".join(prompt + bytes(row).decode("latin-1") + "\n" for prompt, row in zip(PROMPTS, wanted, strict=True))
    for rows in 1, 2:
        code, found, texts, _ = generate(f"{model}:make", *kept, "--prompts", tmp_path / "prompts", "--rows", rows)
        assert code == 0 and found["tokens"] == wanted and texts == shown + "12 new tokens"
    prompt = ",".join(map(str, b"Hello"))
    *_, texts, _ = generate(f"{tmp_path / 'numbers.py'}:make", *kept, "--prompt", prompt)
    assert texts.startswith(",".join(map(str, [*b"Hello", *wanted[0]])) + "\n")


def test_words_keep_their_spaces_and_a_line_of_the_file_is_one_prompt(model, tmp_path, generate):
    """Texts read "Once upon a timethere": new tokens were decoded alone, where SentencePiece drops the first space.
    U+2028 within a line began another prompt, and the mark before a file's first letter was a part of it."""
    decode = '"".join(chr(token or 32) for token in tokens).lstrip()'
    words = MODEL.replace("text.encode()", 'text.encode("latin-1", "replace")')
    words = words.replace("    ids", "    model.lm_head.weight.data.zero_()\n    ids", 1)  # its words are 0
    model.write_text(words.replace('bytes(tokens).decode("latin-1")', decode))
    (tmp_path / "prompts").write_text("Once\u2028upon\n", encoding="utf-8-sig")
    code, found, texts, _ = generate(f"{model}:make", "--prompts", tmp_path / "prompts", "--max-new-tokens", 3)
    assert code == 0 and found["texts"] == ["   "] and texts == "Once\u2028upon   \n3 new tokens"


@pytest.mark.parametrize(
    ("subject", "typed"),
    [
        ("--prompt", []),
        ("--prompt", ["--prompt", "a", "--prompt", ""]),
        ("--prompts", ["--prompts", "missing"]),
        ("--prompt 'words'", ["numbers", "--prompt", "words"]),
        ("generate: 77 tokens", ["--prompt", "a" * 70, "--max-new-tokens", 7]),
        ("--weights", ["--prompt", "a", "--weights", "missing"]),
        ("--tokenizer", ["--prompt", "a", "--tokenizer", "missing"]),
    ],
)
def test_wrong_input_is_one_sentence(subject, typed, model, tmp_path, generate):
    name = typed.pop(0) if typed[:1] == ["numbers"] else "its_model"
    code, *_, err = generate(f"{tmp_path / name}.py:make", *typed)
    assert code == 2 and err.startswith(f"error: {subject}") and err.count("\n") == 1, err


def test_the_time_and_the_keys_and_values_of_generation_are_simulated(capsys):
    typed = "simulate", "--workers", "4", "--microbatches", "8", "--generate", "20"
    assert main([*typed, "--cache", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["makespan"] == 163 and found["cached"] == [20 * 8 * 64] * 4
    assert main([*typed, "--schedule", "zb-v", "--replicas", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cached"] == [20 * 4 * 2] * 4
    assert main([*typed, "--lengths", "1,2"]) == 2


RUN = """
import os
import signal
import sys

import its_model  # of transformers
from rpc_pipe import Pipeline, generation

generation._ROUNDS = 8
model, batch = its_model.make()
pipe = Pipeline(model, num_microbatches=2, example=batch)
prompts = batch["input_ids"][:3]
print("tokens", pipe.generate(prompts, 6, do_sample=False).tolist())
target, number = (os.getpid(), signal.SIGKILL) if sys.argv[1] == "killed" else (os.getppid(), signal.SIGINT)
sent = []
pipe.generate(prompts, 50, do_sample=False, on_tokens=lambda *told: sent or sent.append(os.kill(target, number)))
print("went on")
"""


@pytest.mark.parametrize(("transport", "how"), [("rpc", "killed"), ("zmq", "stopped")])
def test_processes_generate_until_one_is_killed_or_the_user_stops(transport, how, model, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(RUN)
    # The user stops a job of members: all learn of it in the same round, since they compute together.
    workers = [2] if how == "killed" else [4, "--members", 2, "--shard", "fsdp"]
    done = rpc_pipe("run", script, "--workers", *workers, "--transport", transport, "--", how, cwd=tmp_path)
    made = load_user_model(f"{model}:make")
    plain = made.model.generate(made.batch["input_ids"][:3], max_new_tokens=6, do_sample=False)
    assert re.search(rf"\([24] (workers|processes)\) \| tokens {re.escape(str(plain.tolist()))}", done.stdout), done
    assert "went on" not in done.stdout and "Traceback" not in done.stdout + done.stderr
    if how == "killed":
        assert done.returncode == 1 and re.search(r"worker 0 was killed by signal 9 \(SIGKILL\) while", done.stdout)
    else:
        assert done.returncode == 130 and "stopping" in done.stdout + done.stderr
