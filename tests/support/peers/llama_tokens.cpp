// llama.cpp with the devices of ggml-rpc servers, by its own interface in C++.
//
//     llama_tokens MODEL TOKENS [ENDPOINT ...]
//
// Prints the tokens that it generates greedily after a prompt of 24, on one line, twice. Without endpoints it uses
// its own CPU. ggml's client ends the program where a server hangs up.

#include "ggml-backend.h"
#include "ggml-rpc.h"
#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

static const int PROMPT = 24, CONTEXT = 512;

static int computed(llama_context * context, std::vector<llama_token> tokens, int words) {
    if (llama_decode(context, llama_batch_get_one(tokens.data(), (int) tokens.size())) != 0) {
        fprintf(stderr, "llama.cpp failed\n");
        exit(1);
    }
    const float * logits = llama_get_logits_ith(context, -1);
    return (int) (std::max_element(logits, logits + words) - logits);
}

int main(int argc, char ** argv) {
    if (argc < 3) {
        fprintf(stderr, "llama_tokens MODEL TOKENS [ENDPOINT ...]\n");
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    std::vector<ggml_backend_dev_t> devices;
    for (int place = 3; place < argc; place++) {
        devices.push_back(ggml_backend_reg_dev_get(ggml_backend_rpc_add_server(argv[place]), 0));
    }
    devices.push_back(nullptr);
    llama_model_params options = llama_model_default_params();
    options.n_gpu_layers = argc > 3 ? 99 : 0;
    options.devices = argc > 3 ? devices.data() : nullptr;
    llama_model * model = llama_model_load_from_file(argv[1], options);
    llama_context_params given = llama_context_default_params();
    given.n_ctx = CONTEXT;
    given.n_threads = given.n_threads_batch = 2;
    llama_context * context = model ? llama_init_from_model(model, given) : nullptr;
    if (context == nullptr) {
        fprintf(stderr, "llama.cpp cannot load the model\n");
        return 1;
    }
    const int words = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int run = 0; run < 2; run++) {
        llama_memory_clear(llama_get_memory(context), true);
        std::vector<llama_token> prompt(PROMPT);
        for (int place = 0; place < PROMPT; place++) {
            prompt[place] = (7 * place + 3) % words;
        }
        int token = computed(context, prompt, words);
        for (int count = 0; count < atoi(argv[2]); count++) {
            printf("%d ", token);
            token = computed(context, {token}, words);
        }
        printf("\n");
    }
    return 0;
}
