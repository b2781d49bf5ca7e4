"""Code that several tests share. Where to find a tiny model:

checkpoints   `tiny_encoders` (BERT and related models), `tiny_decoders` (Llama, GPT-2, T5, Marian),
              `tiny_checkpoints` (GPT-2 and encoder-decoders), `pruned_checkpoints`,
              `outlier_models`, `adapters`
artifacts     written without a build and torch: `artifacts` (encoders), `decoder_artifacts`,
              `encoder_decoder_artifacts`, `tuning_artifacts` (several candidates), `all_models`
              (one per task, in one store)
builds        `prepared_build`, `shared_exports`; `served_models` (the store of the cluster tests)
engines       one model for every engine: `engine_programs`, `decoder_programs`, `decoder_graphs`
fakes         of deployments: `fakes`, `generators`; of a decoder: `fake_decoder`
"""
