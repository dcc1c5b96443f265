"""`lit-lazy export`"""

import argparse

from lit_lazy.command.options import Commands, add_command, add_options, folder, import_classes


def add_to(commands: Commands) -> None:
    parser = add_command(
        commands, "export", export, "export a trained model to a folder that transformers loads without lit-lazy"
    )
    add_options(parser, "checkpoint", "--import", {"out OUT": ("output folder, new or empty", {"type": folder})})


def export(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.model.export.folder import collect_code, write
    from lit_lazy.report.model_card import format_model_card, read_result
    from lit_lazy.support.disk import check_writable_folder, create_folder_atomically
    from lit_lazy.training import checkpoints

    import_classes(options)
    if options.out.exists() and any(options.out.iterdir()):
        raise ValueError(f"OUT {str(options.out)!r}: is a folder that is not empty; name another")
    module = checkpoints.load(options.checkpoint)
    collect_code(module.cfg.model)
    prompts = checkpoints.load_prompts(options.checkpoint, module, module.cfg.data)
    tokenizer = None if prompts.tokenizer is None else prompts.tokenizer.to_json()
    text = format_model_card(module, read_result(options.checkpoint), tokenizer is not None)
    check_writable_folder("OUT", options.out)
    with create_folder_atomically(options.out.absolute()) as scratch:
        write(scratch, module.model, text, tokenizer, prompts.special)
    note = "" if tokenizer else f"; without a tokenizer, since {prompts.name} has no text"
    names = sorted(file.name for file in options.out.iterdir() if file.suffix != ".py")
    print(f"{options.out}: {', '.join(names)} and Python files{note}")
    return 0
