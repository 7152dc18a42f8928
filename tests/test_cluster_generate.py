"""What cluster/generate.py asks of a model."""

import io
import sys

import pytest
from launch import ROOT, modules_of

with modules_of(9):
    import generate

CHATML = ("{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}")
TOKENS = 8  # of each answer


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """chat(monkeypatch, positions, lines) -> the texts that the model is asked, and its answers."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "tiny_llama")
    tokenizer.chat_template = CHATML

    def chat(monkeypatch, positions: int, lines: list[str]) -> tuple[list[str], list[str]]:
        folder, asked, said = str(tmp_path_factory.mktemp("model")), [], []
        LlamaForCausalLM(LlamaConfig(vocab_size=1024, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=2, max_position_embeddings=positions)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write = LlamaForCausalLM.generate

        def listen(model, input_ids, **settings):
            out = write(model, input_ids, **settings)
            asked.append(tokenizer.decode(input_ids[0]))
            said.append(tokenizer.decode(out[0, input_ids.shape[1]:], skip_special_tokens=True))
            return out

        monkeypatch.setattr(LlamaForCausalLM, "generate", listen)
        monkeypatch.setattr(sys, "argv", ["generate.py", "--checkpoint", folder, "--chat", "--device", "cpu",
                                          "--max_new_tokens", str(TOKENS)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n\n".join(lines).encode())))
        generate.main()
        return asked, said

    return chat


def test_a_chat_remembers_its_turns(chat, monkeypatch):
    asked, said = chat(monkeypatch, 512, ["Who are you?", "And then?"])
    assert asked[0] == "<user>Who are you?\n<assistant>"
    assert asked[1] == f"{asked[0]}{said[0]}\n<user>And then?\n<assistant>"


def test_a_long_chat_forgets_its_first_turns(chat, monkeypatch):
    lines = [f"Question {i}" for i in range(9)]
    asked, said = chat(monkeypatch, 100, lines)
    assert len(asked) == len(lines) and asked[1].startswith("<user>Question 0\n")
    assert "Question 0\n" not in asked[-1] and asked[-1].endswith(f"{said[-2]}\n<user>Question 8\n<assistant>")
