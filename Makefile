.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Setup compiles nothing: most modules are never imported. With this variable every process would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup check format docs docs-serve notebooks try-notebooks figures test test-slow mutants judge judge-nano demo weights bodies study evidence evidence-left evidence-papers evidence-dense evidence-speech evidence-language evidence-generation evidence-linearize summaries teachers plans rates rates-vit rates-pyramid rates-care rates-camvid rates-bccd rates-an4 rates-books rates-cifar10 rates-linearize pilot-vit pilot-clip-vit pilot-pyramid pilot-care language speech speech-demo generation scenes counts parity precision bench bench-deploy bench-compiled bench-gpu bench-figures gpu gpu-list gpu-dry gpu-prepare gpu-tables int8 explorer clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[train,dense,report,cpp,readers,language,speech,generation,onnx,openvino,executorch,coreml,int8,stream,docs,hf,dev]"
	touch $@

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The figures of docs/understand.
figures: $(STAMP)
	$(BIN)/python tools/site/figures.py

# The page of the papers' tables and figures, from the headers of the recipes.
.PHONY: reproduce
reproduce: $(STAMP)
	$(BIN)/python tools/site/reproduce_page.py

# The site, in site/: broken links and anchors, and public names without a docstring, end it. `make explorer` before it adds the explorer.
docs: notebooks
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The notebooks with their results, which the site shows: about 4 minutes of one core together.
NOTEBOOKS := $(notdir $(wildcard notebooks/*.ipynb))
notebooks: $(NOTEBOOKS:%=build/notebooks/%)

# Whether every cell of them works, with a few training steps; keeps nothing.
try-notebooks: $(NOTEBOOKS:%=try/%)

try/%.ipynb: notebooks/%.ipynb | $(STAMP)
	$(BIN)/python tools/site/notebook_pages.py $< --try

build/notebooks/%.ipynb: notebooks/%.ipynb | $(STAMP)
	$(BIN)/python tools/site/notebook_pages.py $<

docs-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

test: $(STAMP)
	$(BIN)/python -m pytest -n auto

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n auto -m "not gpu"

# Whether the tests notice mistakes: make mutants ONLY="'ops_*' 'loss_*'"
mutants: $(STAMP)
	$(BIN)/python tests/mutants/run.py $(if $(ONLY),--only $(ONLY))

judge: $(STAMP)
	$(BIN)/python tests/judge/run.py $(NAMES)

judge-nano: $(STAMP)
	$(BIN)/python tests/judge/run.py "*_nano"

demo: $(STAMP)
	$(BIN)/linvit demo

# The weights that come with linvit: half an hour per network on one core; resumes. make weights CIFAR=FOLDER NOTE="a sentence for the cards"
CIFAR := data/cifar
NOTE :=

weights: $(STAMP)
	mkdir -p linvit/models/weights
	for name in mavit_nano ravlt_nano care_nano; do \
		$(BIN)/linvit train recipes/weights/$${name}_cifar10.yaml --resume data.root="$(CIFAR)" && \
		$(BIN)/linvit convert runs/$${name}_cifar10/checkpoints/last.ckpt linvit/models/weights/$$name.cifar10.safetensors \
			--half --license apache-2.0 $(if $(NOTE),--note "$(NOTE)") || exit 1; \
	done

# The networks from which the detectors and segmentors of the evidence start: 20 to 30 minutes each on one core; resumes.
bodies: $(STAMP)
	mkdir -p docs/evidence/bodies
	for name in mala softmax resnet; do \
		nice -n 19 $(BIN)/linvit train recipes/pretrain/$$name.yaml --resume && \
		$(BIN)/linvit convert runs/pretrain_$$name/checkpoints/last.ckpt docs/evidence/bodies/$$name.safetensors \
			--half --license apache-2.0 $(if $(NOTE),--note "$(NOTE)") || exit 1; \
	done

study: $(STAMP)
	$(BIN)/linvit study --ledger docs/evidence/study.jsonl --write docs/evidence/small-studies.md

# Says what is left, then trains it, study after study; make -k evidence goes on with the next one where data is missing.
evidence: evidence-left evidence-papers evidence-dense evidence-speech evidence-language evidence-generation evidence-linearize summaries

# What the pages of evidence compute from ledgers and tables: claims.csv, claims that were asked later, speeds. Also after make bench.
summaries: $(STAMP)
	$(BIN)/python -m tools.evidence

# A study: its folder of recipes, and its seeds.
EVIDENCE = $(if $(LEFT),,nice -n 19) $(BIN)/linvit study --recipes recipes/evidence/$(1) --folder runs/evidence/$(1) \
	--ledger docs/evidence/$(1).jsonl --write docs/evidence/real-images.md $(2) $(HERE) $(LEFT)
# A comparison: its name on its page, its recipes, the baseline first, and options.
EVIDENT = $(if $(LEFT),,nice -n 19) $(BIN)/linvit compare $(2) --folder runs/evidence/$(1) --ledger docs/evidence/$(or $(4),$(1)).jsonl \
	--write docs/evidence/$(SHOWN_ON).md --workers $(WORKERS) $(3) $(HERE) $(LEFT)
# What this machine has: make evidence ON=gpu WORKERS=8
HERE := $(if $(ON),--set trainer.accelerator=$(ON),$(if $(shell command -v c++),--set task.cpp=true))
WORKERS := 2
SHOWN_ON = $(if $(findstring linearize,$@),linearize,real-images)
LAST_EPOCH := trainer.check_val_every_n_epoch
BODIES := softmax mala resnet
BY_CLASS := pixel_accuracy class_accuracy \
	$(addprefix iou_,sky building pole road pavement tree sign fence car pedestrian cyclist)
IN_ALL := softmax linear mala rala

evidence-left: $(STAMP)
	@$(MAKE) --silent --no-print-directory LEFT=--left evidence-papers evidence-dense evidence-speech evidence-language evidence-generation \
		evidence-linearize

evidence-papers: $(STAMP)
	$(call EVIDENCE,vit,--seeds $(or $(SEEDS),6))
	$(call EVIDENCE,vit,--first-seed 6 --seeds $(or $(SEEDS),12) --set trainer.gradient_clip_val=1.0)
	$(call EVIDENCE,pyramid,--seeds $(or $(SEEDS),8))
	$(call EVIDENT,pyramid_llss_rala,$(foreach m,rala rala_relu,recipes/evidence/pyramid/$(m).yaml),--set model.pattern=LLSS)
	$(call EVIDENT,pyramid_llss_mala,$(foreach m,mala mala_relu,recipes/evidence/pyramid/$(m).yaml),--set model.pattern=LLSS)
	$(call EVIDENCE,care,--seeds $(or $(SEEDS),10))

evidence-dense: $(STAMP)
	$(call EVIDENT,camvid_fpn,$(BODIES:%=recipes/dense/camvid/semantic_fpn_%.yaml),--also $(BY_CLASS) \
		--set data.val=test $(LAST_EPOCH)=15)
	$(call EVIDENT,camvid_upernet,$(BODIES:%=recipes/dense/camvid/upernet_%.yaml),--also $(BY_CLASS) \
		--set data.val=test $(LAST_EPOCH)=15)
	$(call EVIDENT,bccd,$(BODIES:%=recipes/dense/bccd/retinanet_%.yaml),--also box_ap50 --set data.val=test $(LAST_EPOCH)=20)
	$(call EVIDENT,penn_fudan,$(BODIES:%=recipes/dense/penn_fudan/mask_rcnn_%.yaml),--also mask_ap50 box_ap box_ap50 \
		--set $(LAST_EPOCH)=20)

evidence-speech: $(STAMP)
	$(call EVIDENT,an4,$(foreach m,softmax linear mala,recipes/speech/an4_$(m).yaml),--also wer_lm --set $(LAST_EPOCH)=60)

evidence-language: $(STAMP)
	$(call EVIDENT,books,$(IN_ALL:%=recipes/language/books_%.yaml),--also perplexity)
	$(if $(LEFT),,nice -n 19 $(BIN)/python -c "from pathlib import Path; from linvit.studies.language_tasks import write_benchmarks; \
		recipes = [Path(f'recipes/language/books_{name}.yaml') for name in '$(IN_ALL)'.split()]; evidence = Path('docs/evidence'); \
		write_benchmarks(recipes, Path('runs/evidence/books'), 'data/benchmarks', evidence / 'books_benchmarks.jsonl', \
		evidence / 'real-images.md', print)")

evidence-generation: $(STAMP)
	$(call EVIDENT,cifar10,$(IN_ALL:%=recipes/generation/cifar/%.yaml),--also generated_accuracy guided_fid guided_accuracy \
		floor_fid noise_fid classifier_accuracy)
	$(if $(LEFT),,for name in $(IN_ALL); do run=runs/evidence/cifar10/$$name/seed0; \
		test ! -d $$run || $(BIN)/linvit generate $$run --guidance 2 --count 10 --output docs/evidence/cifar10_$$name.png || exit 1; \
	done)

# The network from which the linear DeiTs of the evidence start; the pyramids start from one of the bodies.
teachers: $(STAMP)
	mkdir -p docs/evidence/teachers
	nice -n 19 $(BIN)/linvit train recipes/linearize/cifar/teacher.yaml --resume
	$(BIN)/linvit convert runs/linearize_teacher/checkpoints/last.ckpt docs/evidence/teachers/vit.safetensors --half --license apache-2.0 \
		$(if $(NOTE),--note "$(NOTE)")

# Steps whose weights later runs start from. A ledger has no weights, so on a new machine AGAIN=1 trains its runs once more.
STEP = $(if $(LEFT),,nice -n 19) $(BIN)/linvit compare $(2) --folder runs/evidence/$(1) $(if $(AGAIN),,--ledger docs/evidence/$(1).jsonl) \
	--write docs/evidence/linearize.md --workers $(WORKERS) --also top1 --over $(3) $(HERE) $(LEFT)
WAYS = $(1:%=recipes/evidence/linearize/%.yaml)
SWAPPED := model.mechanism=linear,rala,mala,inline,polaformer
REPLACED := model.mechanism=linear,rala,mala,inline
LEARNED := none outputs maps
# Not seed 0, the teacher's: with it new weights are those from which the teacher's were trained.
COPIES := $(REPLACED) --first-seed 1
KEPT := model.pattern=LLLLLL,LLLLLS,LLLLSS,LLLSSS,SLLLLL,SSLLLL,SSSLLL --set model.mechanism=mala

evidence-linearize: $(STAMP)
	$(call STEP,linearize_align,$(call WAYS,vit/align),$(SWAPPED) --seeds 4)
	$(call STEP,linearize_transfer,$(call WAYS,vit/transfer),$(SWAPPED))
	$(call EVIDENT,linearize_tune,$(call WAYS,vit/new vit/copied vit/tune),--over $(SWAPPED))
	$(call EVIDENT,linearize_tuned,$(call WAYS,vit/tune),--over $(SWAPPED),linearize_tune)
	$(call EVIDENT,linearize_steps,$(call WAYS,vit/copied vit/tune),--over $(SWAPPED),linearize_tune)
	$(call STEP,linearize_pyramid_align,$(call WAYS,pyramid/align),$(REPLACED))
	$(call STEP,linearize_pyramid_transfer,$(call WAYS,pyramid/transfer),$(REPLACED))
	$(call EVIDENT,linearize_pyramid_tune,$(call WAYS,pyramid/new pyramid/copied pyramid/tune),--over $(REPLACED))
	$(call EVIDENT,linearize_pyramid_tuned,$(call WAYS,pyramid/tune),--over $(REPLACED),linearize_pyramid_tune)
	$(call EVIDENT,linearize_pyramid_steps,$(call WAYS,pyramid/copied pyramid/tune),--over $(REPLACED),linearize_pyramid_tune)
	$(call STEP,linearize_copies_align,$(call WAYS,copies/align_outputs_new copies/align_maps_copied copies/align_maps_new),$(COPIES))
	$(call EVIDENT,linearize_copies,$(call WAYS,$(foreach x,nothing attention mlp all,$(LEARNED:%=copies/$(x)_%))),--over $(COPIES))
	$(call EVIDENT,linearize_attention,$(call WAYS,copies/mlp_none copies/all_none),--over $(COPIES),linearize_copies)
	$(call EVIDENT,linearize_attention_outputs,$(call WAYS,copies/mlp_outputs copies/all_outputs),--over $(COPIES),linearize_copies)
	$(call EVIDENT,linearize_learned,$(call WAYS,$(LEARNED:%=copies/all_%)),--over $(COPIES),linearize_copies)
	$(call EVIDENT,linearize_maps,$(call WAYS,copies/all_outputs copies/all_maps),--over $(COPIES),linearize_copies)
	$(call STEP,linearize_hybrid_align,$(call WAYS,vit/align),$(KEPT))
	$(call EVIDENT,linearize_hybrid,$(call WAYS,vit/hybrid),--over $(KEPT))

# Which blocks may become linear; its times need a quiet machine.
PLANNED = $(BIN)/linvit linearize recipes/evidence/linearize/$(1)/align.yaml --plan --size $(2) --output runs/evidence/linearize_plan_$(1) \
	--write docs/evidence/linearize.md --set model.mechanism=mala folder=runs/evidence/linearize_planned_$(1)

plans: $(STAMP)
	$(call PLANNED,vit,256)
	$(call PLANNED,pyramid,512)

# Short runs before the evidence, never on the data that it is measured on: rates-* chose the learning rates, with one seed, and pilot-*
# the numbers of seeds. Those of the three studies in docs/evidence had no ledger yet.
SHORT = nice -n 19 $(BIN)/linvit compare $(foreach m,$(1),recipes/evidence/$(lastword $(subst -, ,$@))/$(m).yaml) \
	--folder runs/$(subst -,/,$@) --ledger docs/evidence/$@.jsonl --workers $(WORKERS)
HELD_OUT := data.held_out=0.1 trainer.check_val_every_n_epoch
ON_CIFAR := trainer.max_epochs=2 $(HELD_OUT)=2
ON_IMAGENETTE := data.root=data/imagenette-80/train trainer.max_epochs=4 $(HELD_OUT)=4

rates: rates-vit rates-pyramid rates-care rates-camvid rates-bccd rates-an4 rates-books rates-cifar10 rates-linearize

LOW_RATES := 5e-4,1e-3,2e-3,4e-3
HIGH_RATES := 1e-3,2e-3,4e-3,8e-3
ALL_RATES := 5e-4,$(HIGH_RATES)
HIGHEST_RATES := $(HIGH_RATES),16e-3,32e-3
BOOK_RATES := 4e-3,8e-3,16e-3
FOR_RATE = --seeds 1 --over optimizer.lr=$(1) --set

pilot-vit: $(STAMP)
	$(call SHORT,$(IN_ALL)) --seeds 3 --set optimizer.lr=2e-3 $(ON_CIFAR)

pilot-clip-vit: $(STAMP)
	$(call SHORT,$(IN_ALL)) --seeds 4 --over trainer.gradient_clip_val=null,1.0 --set $(ON_CIFAR) \
		task.ema_decay=0.99 task.ema_warmup=true

pilot-pyramid: $(STAMP)
	$(call SHORT,$(IN_ALL)) --seeds 3 --set optimizer.lr=2e-3 $(ON_IMAGENETTE)

pilot-care: $(STAMP)
	$(call SHORT,care care_symmetric care_stacked care_no_memory) --seeds 3 --set optimizer.lr=4e-3 $(ON_IMAGENETTE)

rates-vit: $(STAMP)
	$(call SHORT,softmax softmax_gated softmax_unit_query linear rala mala rala_mala focused inline hydra efficient \
		linear_angular enhanced agent mlla) $(call FOR_RATE,$(HIGH_RATES)) $(ON_CIFAR)

rates-pyramid: $(STAMP)
	$(call SHORT,softmax linear rala mala rala_mala inline efficient) $(call FOR_RATE,$(ALL_RATES)) $(ON_IMAGENETTE)

rates-care: $(STAMP)
	$(call SHORT,care) $(call FOR_RATE,$(HIGHEST_RATES)) $(ON_IMAGENETTE)

# UperNet takes the rates of Semantic FPN, Mask R-CNN those of RetinaNet.
rates-camvid: $(STAMP)
	$(call EVIDENT,$@,$(BODIES:%=recipes/dense/camvid/semantic_fpn_%.yaml),$(call FOR_RATE,$(LOW_RATES)) \
		trainer.max_epochs=5 $(LAST_EPOCH)=5)

rates-bccd: $(STAMP)
	$(call EVIDENT,$@,$(BODIES:%=recipes/dense/bccd/retinanet_%.yaml),$(call FOR_RATE,$(LOW_RATES)) \
		trainer.max_epochs=7 $(LAST_EPOCH)=7)

rates-an4: $(STAMP)
	$(call EVIDENT,$@,$(foreach m,softmax linear mala,recipes/speech/an4_$(m).yaml),$(call FOR_RATE,$(HIGH_RATES)) \
		data.held_out=0.1 trainer.max_epochs=15 $(LAST_EPOCH)=15)

rates-books: $(STAMP)
	$(call EVIDENT,$@,$(IN_ALL:%=recipes/language/books_%.yaml),$(call FOR_RATE,$(BOOK_RATES)) \
		data.split=1 data.val_rows=1200 trainer.max_epochs=1 trainer.limit_train_batches=1000 $(LAST_EPOCH)=1)

rates-cifar10: $(STAMP)
	$(call EVIDENT,$@,$(IN_ALL:%=recipes/generation/cifar/%.yaml),$(call FOR_RATE,$(HIGHEST_RATES)) \
		data.held_out=0.1 task.generates=false trainer.max_epochs=2 $(LAST_EPOCH)=2)

ALIGN_RATES := 1e-3,3e-3,1e-2,3e-2,1e-1
MAP_RATES := $(ALIGN_RATES),3e-1

rates-linearize: rates-linearize-linear rates-linearize-mala

rates-linearize-%: $(STAMP)
	$(call EVIDENT,linearize_rates_$*,$(call WAYS,$(foreach x,nothing attention mlp all,copies/$(x)_none)),$(call FOR_RATE,$(LOW_RATES)) \
		model.mechanism=$* data.held_out=0.1 trainer.max_epochs=2 trainer.check_val_every_n_epoch=2)
	$(call EVIDENT,linearize_rates_align_$*,$(call WAYS,vit/align),--also top1 $(call FOR_RATE,$(ALIGN_RATES)) model.mechanism=$* \
		data.held_out=0.1)
	$(call EVIDENT,linearize_rates_maps_$*,$(call WAYS,copies/align_maps_copied),--also top1 $(call FOR_RATE,$(MAP_RATES)) \
		model.mechanism=$* data.held_out=0.1)

language: $(STAMP)
	$(BIN)/linvit compare $(foreach m,softmax linear mala rala,recipes/language/stdlib_bytes_$(m).yaml) \
		--folder runs/language/bytes --ledger docs/evidence/language_bytes.jsonl --seeds 3 --workers $(WORKERS)
	$(BIN)/linvit compare $(foreach m,softmax linear mala rala,recipes/language/memory/recall_$(m).yaml) \
		--folder runs/language/recall --ledger docs/evidence/language_recall.jsonl --seeds 3 --workers $(WORKERS) --over data.pairs=4,8,16,32
	$(BIN)/linvit compare $(foreach m,softmax linear mala rala,recipes/language/memory/copy_$(m).yaml) \
		--folder runs/language/copy --ledger docs/evidence/language_copy.jsonl --seeds 3 --workers $(WORKERS) --over data.symbols=8,16,32
	$(BIN)/linvit bench decoding --output runs/language/decoding

# Needs espeak-ng, which your system's packages have; says so where it is absent.
data/speech/.made: | $(STAMP)
	$(BIN)/linvit data make-speech $(@D)
	touch $@

speech-demo: data/speech/.made
	$(BIN)/linvit train recipes/speech/spoken_mala.yaml --resume
	$(BIN)/linvit eval runs/spoken_mala --report
	$(BIN)/linvit predict runs/spoken_mala data/speech/val/200

speech: data/speech/.made
	$(BIN)/linvit compare $(foreach m,softmax linear mala,recipes/speech/spoken_$(m).yaml) \
		--folder runs/speech --ledger docs/evidence/speech.jsonl --seeds 3 --workers $(WORKERS)

generation: $(STAMP)
	$(BIN)/linvit compare $(foreach m,softmax linear mala rala,recipes/generation/digits_$(m).yaml) \
		--folder runs/generation --ledger docs/evidence/generation.jsonl --seeds 3 --workers $(WORKERS) --also generated_accuracy guided_fid guided_accuracy
	$(BIN)/linvit bench sampling --output runs/generation/sampling

scenes: $(STAMP)
	test -d data/scenes || $(BIN)/linvit data make-scenes data/scenes
	for name in mask_rcnn retinanet cascade_mask_rcnn semantic_fpn upernet; do \
		$(BIN)/linvit train recipes/dense/scenes/$$name.yaml --resume && \
		$(BIN)/linvit eval runs/scenes_$$name --report || exit 1; \
	done

# What `linvit models` prints; a test compares it with the code.
counts: $(STAMP)
	$(BIN)/python -c "from linvit.runs.listing import store_networks; store_networks()"

parity: $(STAMP)
	$(BIN)/python -m pytest -m "slow or not slow" -s -q tests/models/test_parity.py

precision: $(STAMP)
	$(BIN)/linvit bench precision --output runs/precision

# Every part is a folder with a bench.json; one that is there is not measured again. Quiet machine, about half an hour.
BENCH := runs/bench
BENCH_PARTS := op op_own op_backward model model_threads model_batch8 model_kept model_bf16 resolution linearize train curves
DEPLOY_PARTS := onnxruntime openvino executorch
GPU_PARTS := gpu_op gpu_op_backward gpu_softmax gpu_model gpu_train gpu_linearize
BENCH_PAGE = $(if $(filter $(DEPLOY_PARTS),$*),deployment,$(if $(filter %linearize,$*),linearize,benchmarks-$(BENCH_KIND)))
BENCH_KIND = $(if $(filter op% gpu_op% gpu_softmax,$*),operator,$(if $(filter %train curves,$*),training,networks))
BENCHED = --output $(@D) --write docs/evidence/$(BENCH_PAGE).md

bench: $(BENCH_PARTS:%=$(BENCH)/%/bench.json)
bench-deploy: $(DEPLOY_PARTS:%=$(BENCH)/%/bench.json)
bench-compiled: $(BENCH)/compiled/bench.json
bench-gpu: $(GPU_PARTS:%=$(BENCH)/%/bench.json)

$(BENCH)/%/bench.json: | $(STAMP)
	$(BIN)/linvit bench $(BENCH_$*) $(BENCHED)

# Draws the figures of accuracy again from the tables of the pages, without measuring.
bench-figures: $(STAMP)
	$(BIN)/python tools/site/redraw.py

# Jobs for a GPU, docs/contribute/gpu.md; with the Python of the machine where there is no .venv, since it may have no network.
GPU = $(or $(wildcard $(BIN)/python),$(PYTHON)) -m tools.gpu
JOBS :=

gpu:
	$(GPU) $(JOBS) $(if $(OUT),--out "$(OUT)")

gpu-list gpu-dry gpu-prepare gpu-tables:
	$(GPU) --$(@:gpu-%=%) $(JOBS)

# What 8 bits cost the networks that come with weights: half an hour on one quiet core. make int8 CIFAR=FOLDER
int8: $(STAMP)
	$(BIN)/python -c "from pathlib import Path; from linvit.studies.eight_bits import write_bundled; write_bundled('$(CIFAR)', Path('docs/evidence/deployment.md'), print)"

BENCH_op := op --variants plain cpp reference sdpa --memory --rounds 7 --seconds 90
BENCH_op_own := op rala mala --variants plain cpp reference sdpa --layout own --rounds 7 --seconds 60
BENCH_op_backward := op --variants plain cpp reference sdpa --backward --tokens 784 3136 12544 --memory --rounds 5 --seconds 60
BENCH_model := model --variants plain reference fused fused+cpp --rounds 9 --seconds 90 --memory
BENCH_model_threads := model --variants plain reference fused fused+cpp --batch 1 8 --threads 2 --peers --rounds 9 --seconds 90
BENCH_model_batch8 := model --variants plain reference fused fused+cpp --batch 8 --rounds 7 --seconds 150 \
	--peers convnext_tiny deit_small_patch16_224 swin_tiny_patch4_window7_224 efficientvit_b1 fastvit_t8 \
	mobilenetv4_conv_medium
BENCH_model_kept := model --variants plain reference fused fused+cpp --batch 8 --peers convnext_tiny efficientvit_b1 \
	mobilenetv4_conv_medium --rounds 7 --seconds 90 --keep-memory
BENCH_model_bf16 := model --variants plain reference bf16 fused+bf16 fused+cpp+bf16 --peers deit_small_patch16_224 convnext_tiny --peer-variants plain bf16 \
	--batch 1 8 --rounds 5 --seconds 60
# Writing the files takes longer than measuring them: about ten minutes per runtime.
ON_DEVICES := ravlt_tiny mavit_tiny care_s0 care_s1 --peers efficientvit_b1 mobilenetv4_conv_medium fastvit_t8 repvit_m1_0 \
	shvit_s3 deit_small_patch16_224 convnext_tiny --rounds 11 --memory
BENCH_onnxruntime := model $(ON_DEVICES) --variants onnxruntime onnxruntime+int8 --peer-variants onnxruntime onnxruntime+int8
BENCH_openvino := model $(ON_DEVICES) --variants openvino openvino+bf16 openvino+int8 \
	--peer-variants openvino openvino+bf16 openvino+int8
BENCH_executorch := model $(ON_DEVICES) --variants executorch executorch+int8 --peer-variants executorch executorch+int8
BENCH_resolution := model ravlt_tiny ravlt_tiny_linear --variants plain fused+cpp --peers swin_tiny_patch4_window7_224 \
	--peer-variants plain --sizes 224 512 1024 1024x2048 --rounds 5 --seconds 60 --memory
BENCH_linearize := model deit_tiny_linear deit_tiny_rala deit_tiny_mala --variants plain fused+cpp --peers deit_tiny_patch16_224 \
	--peer-variants plain --sizes 224 512 1024 2048 --rounds 5 --seconds 60 --memory
BENCH_train := train --variants plain reference channels_last+fused_adamw channels_last+fused_adamw+cpp \
	checkpointing --rounds 5 --seconds 60 --memory
BENCH_curves := train ravlt_nano mavit_nano care_nano --size 64 --batch 8 --curves 50 --rounds 3 --seconds 10
BENCH_compiled := model ravlt_tiny --variants plain fused frozen fused+frozen --peers --batch 8 --rounds 5
BENCH_gpu_op := op rala mala --device cuda --dtypes bfloat16 --batch 64 --heads 8 --tokens 3136 12544 \
	--variants plain triton reference --memory --rounds 7 --seconds 2
BENCH_gpu_op_backward := $(BENCH_gpu_op) --backward
BENCH_gpu_softmax := op rala mala linear --device cuda --dtypes bfloat16 --batch 8 --tokens 49 196 784 3136 12544 \
	--variants plain triton sdpa --memory --rounds 7 --seconds 1
BENCH_gpu_model := model --device cuda --variants plain fused fused+bf16 fused+bf16+triton \
	--peers deit_small_patch16_224 convnext_tiny swin_tiny_patch4_window7_224 --peer-variants plain bf16 --batch 64 \
	--memory --rounds 5 --seconds 4
BENCH_gpu_train := train ravlt_small_linear --device cuda --variants plain reference bf16 bf16+triton --batch 64 --memory \
	--rounds 3 --seconds 4
BENCH_gpu_linearize := model deit_tiny_linear deit_tiny_mala --device cuda --variants fused+bf16 fused+bf16+triton \
	--peers deit_tiny_patch16_224 --peer-variants bf16 --sizes 224 512 1024 2048 --memory --rounds 5 --seconds 2

# The page of `linvit explore` in build/explorer; needs npm, which downloads the runtime of the networks. Two minutes.
explorer: $(STAMP)
	mkdir -p build/npm
	cp linvit/explorer/npm/package.json linvit/explorer/npm/package-lock.json build/npm
	npm ci --prefix build/npm --ignore-scripts --no-audit --no-fund
	$(BIN)/python -m linvit.explorer.building build/npm/node_modules build/explorer

clean:
	rm -rf $(VENV) runs build dist site
