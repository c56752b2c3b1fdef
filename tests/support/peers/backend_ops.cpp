// Runs the cases of ggml's test-backend-ops on an RPC server, of which its own program has no option.
//
//     backend_ops ENDPOINT
//     backend_ops list
//     backend_ops serve ENDPOINT
//
// Reads the number of a case from each line, and answers "NUMBER ok", "NUMBER fail" or "NUMBER skip" where ggml's
// own CPU does not support it. ggml's client ends the program where the server hangs up. `list` prints the names.
// `serve` is ggml's own server over its CPU, until it is killed.

#define main test_backend_ops_main
#include "test-backend-ops.cpp"
#undef main

#include "ggml-rpc.h"

#include <iostream>
#include <unistd.h>

using Cases = std::vector<std::unique_ptr<test_case>>;

// What a case prints of its differences goes to stderr.
static int apart() {
    int results = dup(STDOUT_FILENO);
    dup2(STDERR_FILENO, STDOUT_FILENO);
    return results;
}

static void list_cases(const Cases & cases, int results) {
    for (size_t number = 0; number < cases.size(); number++) {
        // A filter that nothing matches: the graph is built, and no more.
        cases[number]->eval(nullptr, nullptr, "-", nullptr);
        dprintf(results, "%zu %s(%s)\n", number, cases[number]->current_op_name.c_str(),
                cases[number]->vars().c_str());
    }
}

static ggml_backend_t reference() {
    ggml_backend_t cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    auto use_reference = (void (*)(ggml_backend_t, bool)) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu)), "ggml_backend_cpu_set_use_ref");
    use_reference(cpu, true);
    return cpu;
}

int main(int argc, char ** argv) {
    int results = apart();
    if (argc == 3 && std::string(argv[1]) == "serve") {
        ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        ggml_backend_rpc_start_server(argv[2], nullptr, 2, 1, &cpu);
        return 1;
    }
    if (argc != 2) {
        fprintf(stderr, "backend_ops ENDPOINT, list, or serve ENDPOINT\n");
        return 2;
    }
    Cases cases = make_test_cases_eval();
    if (std::string(argv[1]) == "list") {
        list_cases(cases, results);
        return 0;
    }
    ggml_backend_reg_t server = ggml_backend_rpc_add_server(argv[1]);
    ggml_backend_ptr device(ggml_backend_dev_init(ggml_backend_reg_dev_get(server, 0), nullptr));
    ggml_backend_ptr cpu(reference());
    for (size_t number; std::cin >> number && number < cases.size();) {
        test_status_t found = cases[number]->eval(device.get(), cpu.get(), nullptr, nullptr);
        fflush(stdout);
        const char * word = found == test_status_t::OK ? "ok" : found == test_status_t::FAIL ? "fail" : "skip";
        dprintf(results, "%zu %s\n", number, word);
    }
    return 0;
}
