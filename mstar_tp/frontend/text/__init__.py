"""Between text and tokens: tokenizers, chat templates, tools, images, detokenizing."""
