"""What cluster/generate.py asks of a model."""

import io
import sys

from launch import ROOT, modules_of

with modules_of(9):
    import generate

CHATML = ("{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}")


def test_a_chat_remembers_its_turns_as_far_as_there_is_room(monkeypatch, tmp_path):
    """Each question comes with all that was said before, but for the first turns of a long chat."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "tiny_llama")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path)
    LlamaForCausalLM(LlamaConfig(vocab_size=1024, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                 num_attention_heads=2, max_position_embeddings=100)).save_pretrained(tmp_path)
    asked, said, write = [], [], LlamaForCausalLM.generate

    def listen(model, input_ids, **settings):
        out = write(model, input_ids, **settings)
        asked.append(tokenizer.decode(input_ids[0]))
        said.append(tokenizer.decode(out[0, input_ids.shape[1]:], skip_special_tokens=True))
        return out

    monkeypatch.setattr(LlamaForCausalLM, "generate", listen)
    monkeypatch.setattr(sys, "argv", ["generate.py", "--checkpoint", str(tmp_path), "--chat", "--device", "cpu",
                                      "--max_new_tokens", "8"])
    lines = [f"Question {i}" for i in range(9)]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n\n".join(lines).encode())))
    generate.main()
    assert len(asked) == len(lines) and asked[0] == "<user>Question 0\n<assistant>"
    assert asked[1] == f"{asked[0]}{said[0]}\n<user>Question 1\n<assistant>"
    assert "Question 0\n" not in asked[-1] and asked[-1].endswith(f"{said[-2]}\n<user>Question 8\n<assistant>")
