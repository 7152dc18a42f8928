"""trl: SFT, packed and not, with completions alone, and DPO, over DDP."""

import of_trainer
from of_transformers import config_of, prepare  # noqa: F401
from rows import LENGTH, STEPS, VOCABULARY, Row, shake

NEEDS = ("torch==2.13.0", "trl==1.16.0", "transformers==5.24.0", "accelerate==1.15.0", "peft==0.21.2",
         "datasets==5.2.0", "numpy==2.4.6")
SHOWN = ("trl", "transformers")


def tokenizer():
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def texts(count, salt, least=4):
    import torch

    draw = torch.Generator().manual_seed(salt)
    lengths = [least + (5 * i + 3) % (LENGTH - least) for i in range(count)]
    return [
        " ".join(f"w{int(each)}" for each in torch.randint(3, VOCABULARY, (length,), generator=draw))
        for length in lengths
    ]


def model_of(row):
    import transformers

    return shake(transformers.AutoModelForCausalLM.from_config(config_of(row.model)))


def sft(row, folder):
    import datasets
    import trl

    options = dict(row.options.get("arguments", {}), max_length=LENGTH, dataset_num_proc=None, use_liger_kernel=False,
                   bf16=False, gradient_checkpointing=False)
    if row.options.get("completions"):
        columns = {"prompt": texts(8 * STEPS, 1), "completion": [" " + each for each in texts(8 * STEPS, 2)]}
    else:
        columns = {"text": texts(8 * STEPS * (4 if options.get("packing") else 1), 1)}
    made = {**row.options, "arguments": options}
    of_trainer.trainer(
        dataclass_with(row, made), folder, trainer_class=trl.SFTTrainer, arguments=trl.SFTConfig, model=model_of(row),
        train_dataset=datasets.Dataset.from_dict(columns), processing_class=tokenizer(), data_collator=None)


def dpo(row, folder):
    import datasets
    import trl

    options = dict(row.options.get("arguments", {}), max_length=2 * LENGTH, bf16=False, gradient_checkpointing=False)
    columns = {"prompt": texts(8 * STEPS, 1), "chosen": [" " + each for each in texts(8 * STEPS, 2)],
               "rejected": [" " + each for each in texts(8 * STEPS, 3)]}
    of_trainer.trainer(
        dataclass_with(row, {**row.options, "arguments": options}), folder, trainer_class=trl.DPOTrainer,
        arguments=trl.DPOConfig, model=model_of(row), ref_model=model_of(row),
        train_dataset=datasets.Dataset.from_dict(columns), processing_class=tokenizer(), data_collator=None)


def dataclass_with(row, options):
    import dataclasses

    return dataclasses.replace(row, options=options)


def rows():
    for words, run, more in (
            ("SFT", sft, {}), ("SFT completions alone", sft, dict(completions=True)),
            ("SFT packing", sft, dict(arguments=dict(packing=True, packing_strategy="wrapped"))),
            ("SFT packing, best fit", sft, dict(arguments=dict(packing=True))), ("DPO", dpo, {}),
            ("SFT assistant loss dft", sft, dict(arguments=dict(loss_type="dft")))):
        for over, arguments in (("DDP 2", {}), ("DDP 2, clipped", dict(max_grad_norm=0.1))):
            options = {**more, "arguments": {**more.get("arguments", {}), **arguments}}
            yield Row("trl", "llama", f"{words}, {over}", run, data=2, options=options)


ROWS = [*rows()]
