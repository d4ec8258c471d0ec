"""Small random models of Hugging Face with their tokenizers and processors, in folders that it saves itself."""

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    ViTModel,
)

END = "<|endoftext|>"
TEXTS = [
    "a man in a red shirt climbs a rock .",
    "two dogs run over the green grass ,",
    "the children don't play in the blue water!",
    "a big brown cat is sitting on the table with a small bird",
] * 3
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}


def wide(model, std=0.2):
    """Weights drawn wide enough that logits do not tie."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=std)
    return model.eval()


def byte_pairs(vocab_size=300):
    """GPT-2's tokenizer, learned from a few texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=END, eos_token=END, unk_token=END)


def gpt2(vocab_size, end, **changes):
    sizes = {"vocab_size": vocab_size, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 3}
    model = wide(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=end, eos_token_id=end, **changes)))
    model.transformer.wpe.weight.data *= 4  # or a random model with tied embeddings repeats one token
    return model


def saved_captioner(folder, *, side=24, generation=None, processor=None, **options):
    """A ViT with a GPT-2, as nlpconnect/vit-gpt2-image-captioning is laid out."""
    tokenizer = byte_pairs()
    end = tokenizer.eos_token_id
    encoder = wide(ViTModel(ViTConfig(image_size=side, patch_size=8, **SIZES), add_pooling_layer=False))
    decoder = gpt2(len(tokenizer), end, add_cross_attention=True, is_decoder=True)
    model = VisionEncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    special = {"decoder_start_token_id": end, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    model.generation_config.update(**special, **(generation or {}))
    processor = processor or ViTImageProcessor(size={"height": side, "width": side})
    for part in (tokenizer, processor):
        part.save_pretrained(folder)
    model.save_pretrained(folder, **options)
    return model, tokenizer, processor


def saved_gpt2(folder, **options):
    tokenizer = byte_pairs()
    model = gpt2(len(tokenizer), tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder, **options)
    return model, tokenizer


def saved_classifier(folder, names):
    labels = dict(enumerate(names))
    config = ViTConfig(
        image_size=24, patch_size=8, **SIZES, id2label=labels, label2id={v: k for k, v in labels.items()}
    )
    model, processor = wide(ViTForImageClassification(config)), ViTImageProcessor(size={"height": 24, "width": 24})
    processor.save_pretrained(folder)
    model.save_pretrained(folder)
    return model, processor


def photos(folder, count=8):
    """Pictures of mixed sizes, coloured at random in coarse patches."""
    folder.mkdir(exist_ok=True)
    paths = []
    for number in range(count):
        cells = torch.randint(256, (7, 9, 3), dtype=torch.uint8).numpy()
        path = folder / f"{number}.png"
        Image.fromarray(cells).resize((30 + 17 * number, 90 - 7 * number), Image.Resampling.BICUBIC).save(path)
        paths.append(str(path))
    return paths
