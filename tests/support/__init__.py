"""Code that several tests share. Where to find tiny models, fakes and in-process servers:

checkpoints   `tiny_encoders` (BERT and related models), `tiny_decoders` (Llama, GPT-2, T5, Marian),
              `tiny_checkpoints` (GPT-2 and encoder-decoders), `pruned_checkpoints`,
              `outlier_models`, `adapters`
artifacts     written without a build or torch: `artifacts` (encoders), `decoder_artifacts`,
              `encoder_decoder_artifacts`, `tuning_artifacts` (several candidates), `all_models`
              (one per task, in one store)
builds        `prepared_build`, `shared_exports`; `served_models` (the store of the cluster tests)
engines       one model for every engine: `engine_programs`, `decoder_programs`, `decoder_graphs`
fakes         of deployments: `fakes`, `generators`, `channel_replicas`; with scripted output:
              `scripted_generation`, `benchmark_generation`, `benchmark_fakes`; of a decoder:
              `fake_decoder`, `virtual_time`; of builds: `fake_builds`; of a hub: `model_hub`; of
              CUDA: `captured_sessions`, `flash_attention`; one-file plug-ins: `toy_engine`,
              `toy_task`, `toy_rival`
releases      `released` (format versions of the last release)
in process    `local_clients` (clients of replicas), `in_process` (the whole application)
"""
