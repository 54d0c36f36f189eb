"""`transformers serve` on the folder of an attached model, on the loopback interface: the answers of `generate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from affine_attention import Mechanism
from tests.nn.test_distributed import free_port

from .models import VOCABULARY, make_model

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("uvicorn")

NEW, LIMIT = 8, 60.0
PROMPTS = ("w5 w9 w33 w2 w17", "w3", "w8 w8 w40 w41 w42 w43 w44 w45 w46 w47 w48 w49")
# The options of the server for a small cache; the first has another name in newer versions and is still taken.
SMALL = {"cb_block_size": 8, "cb_num_blocks": 64, "cb_max_batch_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint with a tokenizer of words w0, w1, .."""
    path = tmp_path_factory.mktemp("attached")
    model = make_model("llama", Mechanism.named("affine_gated", bias_length=6))
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    inputs = ["input_ids", "attention_mask"]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", model_input_names=inputs)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def told(folder) -> dict[str, str]:
    """What `generate` answers to each prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    answers = {}
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        made = model.generate(tokens, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        answers[prompt] = tokenizer.decode(made[0, tokens.shape[1] :])
    assert len(set(answers.values())) == len(PROMPTS)
    return answers


def ask(port: int, path: str, **body) -> str:
    address = f"http://localhost:{port}{path}"
    data = json.dumps(body | {"max_tokens": NEW, "temperature": 0}).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT) as response:
        return response.read(100_000).decode()


def wait_for(port: int) -> None:
    limit = time.monotonic() + LIMIT
    while time.monotonic() < limit:
        try:
            urllib.request.urlopen(f"http://localhost:{port}/health", timeout=2).close()
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.1)
        else:
            return
    raise AssertionError("the server did not start")


def assert_answers(port: int, folder: Path, told: dict[str, str]) -> None:
    for prompt, answer in told.items():
        whole = json.loads(ask(port, "/v1/completions", model=str(folder), prompt=prompt))
        assert whole["choices"][0]["text"].split() == answer.split()
    prompt, answer = next(iter(told.items()))
    message = {"role": "user", "content": prompt}
    stream = ask(port, "/v1/chat/completions", model=str(folder), messages=[message], stream=True)
    parts = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"])
    assert text.split() == answer.split()
    assert len(parts) > NEW  # one by one


def test_the_server_of_transformers(folder, told):
    """In this process, which has imported affine_attention.hf: no code of the folder runs."""
    from transformers.cli.serve import Serve

    port = free_port()
    server = Serve(
        force_model=str(folder), continuous_batching=True, device="cpu", dtype="float32", port=port, non_blocking=True,
        **SMALL,
    )  # fmt: skip
    try:
        wait_for(port)
        assert_answers(port, folder, told)
    finally:
        server.kill_server()


@pytest.mark.slow
@pytest.mark.parametrize("batching", [["--continuous-batching"], []])
def test_the_command_of_transformers(folder, told, batching):
    """A process that learns of this package from the folder, with --trust-remote-code."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(folder), *batching,
               "--trust-remote-code", "--device", "cpu", "--dtype", "float32", "--port", str(port),
               "--cb-block-size", "8", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "64"]  # fmt: skip
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        assert_answers(port, folder, told)
    finally:
        process.terminate()
        process.wait(LIMIT)
