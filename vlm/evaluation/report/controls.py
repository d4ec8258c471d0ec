"""Names of metrics and controls for people. Controls use little of the input; a model should beat them."""

TITLES = {"bleu4": "BLEU-4", "bleu1": "BLEU-1", "bleu2": "BLEU-2", "bleu3": "BLEU-3", "rouge_l": "ROUGE-L"}
TITLES |= {"cider": "CIDEr", "exact_match": "exact match", "top5": "top 5", "length_ratio": "length ratio"}
TITLES |= {"bleu": "BLEU", "chrf": "chrF", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
TITLES |= {"cer": "character errors", "wer": "word errors", "f1": "F1", "span_f1": "span F1"}
TITLES |= {f"{kind}_recall_{depth}": f"{kind} recall at {depth}" for kind in ("text", "image") for depth in (1, 5, 10)}
CONTROLS = {
    "chance": "by chance",
    "constant": "best constant",
    "bag": "bag of words",
    "frequent": "most frequent tag of each word",
    "dictionary": "word for word",
    "overlap": "part beside most words of the question",
    "question": "most frequent answer to the question",
    "unigram": "token frequencies",
    "shuffled": "shuffled",
    "blank": "blank image",
}
CEILING = {"ceiling": "ceiling"}  # no control: a model at it has nothing left to learn
