// llama-moe-trace: record which experts of a Mixture-of-Experts model every token of a text is routed to.
//
// It listens to the evaluation of the graph and copies the router's choice, `ffn_moe_topk-<layer>`, row by row. Nothing
// is changed: not the weights, not the graph, not the result. Only llama.h and ggml.h are used, so it builds
// inside llama.cpp (patches/llama-moe-trace.patch) and against any installed libllama of the same version.
// The output format is described in patches/README.md.

#include "text-windows.h"
#include "topk-tap.h"
#include "trace-file.h"

#include "ggml.h"
#include "llama.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t MIN_TOKENS = 32; // less says nothing about routing
constexpr int MAX_CTX     = 1 << 20; // more than any model is trained for; what wraps in llama.cpp is far above
constexpr int MAX_THREADS = 512;     // GGML_MAX_N_THREADS: the thread pool does not look

volatile std::sig_atomic_t interrupted = 0;

// Ends the run with one line on stderr and exit code 2, or 130 after Ctrl-C.
[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char * format, ...) {
    char line[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    throw std::runtime_error(line);
}

// ---- the command line ----

const char * const USAGE =
    "usage: llama-moe-trace -m MODEL.gguf -f TEXT -o OUT.moetrace [options]\n"
    "\n"
    "Record which experts every token of TEXT is routed to.\n"
    "\n"
    "  -m FILE          the model (GGUF; of a split model, its first file)\n"
    "  -f FILE          the text to run through it\n"
    "  -o FILE          the trace to write; must not exist\n"
    "  --ctx N          tokens per window; the cache is cleared between windows (default 512)\n"
    "  --max-tokens N   only the first N tokens of the text (default: all)\n"
    "  --decode         one token at a time, as generation routes, instead of in batches\n"
    "  -t N             threads (default: all that this machine has)\n"
    "  -ngl N           layers on the GPU, -1 for all (default 0)\n";

struct options {
    std::string model, input, output;
    int  ctx        = 512;
    int  max_tokens = INT_MAX;
    int  threads    = std::min(std::max(1, (int) std::thread::hardware_concurrency()), MAX_THREADS);
    int  gpu_layers = 0;
    bool decode     = false;
};

struct bounded {
    int * number;
    int least, most;
};

int integer(const std::string & name, const std::string & value, int least, int most) {
    char * end = nullptr;
    errno = 0;
    const long number = std::strtol(value.c_str(), &end, 10);
    if (value.empty() || *end || errno || number < least || number > most) {
        fail("%s takes an integer from %d to %d, not '%s'", name.c_str(), least, most, value.c_str());
    }
    return (int) number;
}

options parse(int argc, char ** argv) {
    options opt;
    const std::map<std::string, std::string *> paths = {{"-m", &opt.model}, {"-f", &opt.input}, {"-o", &opt.output}};
    const std::map<std::string, bounded> numbers = {
        {"--ctx", {&opt.ctx, 2, MAX_CTX}},
        {"--max-tokens", {&opt.max_tokens, 1, INT_MAX}},
        {"-t", {&opt.threads, 1, MAX_THREADS}},
        {"-ngl", {&opt.gpu_layers, -1, INT_MAX}},
    };
    for (int i = 1; i < argc; i++) {
        const std::string name = argv[i];
        if (name == "-h" || name == "--help") {
            fputs(USAGE, stdout);
            std::exit(0);
        }
        if (name == "--decode") {
            opt.decode = true;
            continue;
        }
        const auto path = paths.find(name);
        const auto number = numbers.find(name);
        if (path == paths.end() && number == numbers.end()) {
            fail("unknown option '%s'; --help lists them", name.c_str());
        }
        if (++i == argc) {
            fail("%s needs a value", name.c_str());
        }
        if (path != paths.end()) {
            *path->second = argv[i];
        } else {
            *number->second.number = integer(name, argv[i], number->second.least, number->second.most);
        }
    }
    if (opt.model.empty() || opt.input.empty() || opt.output.empty()) {
        fail("-m MODEL, -f TEXT and -o OUT are all needed; --help explains them");
    }
    return opt;
}

std::string read_text(const std::string & path) {
    std::unique_ptr<FILE, int (*)(FILE *)> file(fopen(path.c_str(), "rb"), fclose);
    std::string content;
    char block[1 << 16];
    for (size_t count; file && content.size() <= INT_MAX && (count = fread(block, 1, sizeof block, file.get()));) {
        content.append(block, count);
    }
    if (!file || ferror(file.get())) {
        fail("%s: cannot read the text (%s)", path.c_str(), strerror(errno));
    }
    if (content.size() > INT_MAX) {
        fail("%s: too long: a text may have at most %d bytes", path.c_str(), INT_MAX);
    }
    const size_t broken = not_utf8(content);
    if (broken != std::string::npos) {
        fail("%s: not UTF-8 text (byte %zu): convert it first", path.c_str(), broken);
    }
    return content;
}

// ---- listening ----

bool on_node(ggml_tensor * t, bool ask, void * user) {
    tap & listener = *static_cast<tap *>(user);
    const int layer = listener.expected ? topk_layer(t->name) : -1;
    if (ask) {
        return layer >= 0;
    }
    if (layer >= 0 && listener.failure.empty()) {
        listener.take(layer, t);
    }
    return !interrupted && listener.failure.empty(); // false ends the graph early; the call is then thrown away
}

// ---- the run ----

// llama.cpp's own messages: only its first complaint is kept, to explain a failure in the one line that we print.
std::string complaint;

void keep_complaint(ggml_log_level level, const char * message, void *) {
    if (level == GGML_LOG_LEVEL_ERROR && complaint.empty()) {
        const char * const colon = std::strstr(message, ": "); // after it the text, before it the C function
        complaint = colon ? colon + 2 : message;
        complaint.resize(std::min(complaint.find('\n'), complaint.size()));
    }
}

using model_ptr   = std::unique_ptr<llama_model, void (*)(llama_model *)>;
using context_ptr = std::unique_ptr<llama_context, void (*)(llama_context *)>;

std::string metadata(const llama_model * model, const std::string & key) {
    char value[256];
    return llama_model_meta_val_str(model, key.c_str(), value, sizeof value) < 0 ? "" : value;
}

// The token that every window starts with, or LLAMA_TOKEN_NULL where the model wants none.
llama_token bos_of(const llama_model * model) {
    const llama_vocab * vocab = llama_model_get_vocab(model);
    return llama_vocab_get_add_bos(vocab) ? llama_vocab_bos(vocab) : LLAMA_TOKEN_NULL;
}

model_ptr load(const options & opt) {
    if (opt.gpu_layers != 0 && !llama_supports_gpu_offload()) {
        fail("this llama.cpp was built without GPU support: leave out -ngl, or build one that has it");
    }
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = opt.gpu_layers;
    params.progress_callback = [](float, void *) { return !interrupted; };
    model_ptr model(llama_model_load_from_file(opt.model.c_str(), params), llama_model_free);
    if (interrupted) {
        fail("interrupted, nothing written");
    }
    if (!model) {
        fail("%s: llama.cpp cannot load this model (%s)", opt.model.c_str(), complaint.c_str());
    }
    return model;
}

int count_experts(const options & opt, const llama_model * model) {
    const std::string architecture = metadata(model, "general.architecture");
    const int count = std::atoi(metadata(model, architecture + ".expert_count").c_str());
    if (count == 0) {
        fail("%s is a dense model (%s): it has no experts to trace", opt.model.c_str(), architecture.c_str());
    }
    return count;
}

context_ptr open_context(const options & opt, llama_model * model, tap & listener) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = opt.ctx;
    params.n_ubatch = std::min(params.n_batch, 512u); // as `edgemoe trace`: results depend on it
    params.n_threads = params.n_threads_batch = opt.threads;
    params.cb_eval = on_node;
    params.cb_eval_user_data = &listener;
    context_ptr context(llama_init_from_model(model, params), llama_free);
    if (!context) {
        fail("%s: llama.cpp cannot open a context of %d tokens (%s)", opt.model.c_str(), opt.ctx, complaint.c_str());
    }
    return context;
}

// Plain text: no special token is read out of it, and BOS is not added here.
token_list tokenize(const options & opt, const llama_model * model, const std::string & content) {
    const llama_vocab * vocab = llama_model_get_vocab(model);
    const int size = (int) content.size();
    token_list tokens(content.size() + 16); // a token is a byte at least, but for what a vocabulary puts in front
    const int count = llama_tokenize(vocab, content.data(), size, tokens.data(), (int) tokens.size(), false, false);
    if (count < 0) {
        fail("%s: the model's tokenizer fails on this text (%s)", opt.input.c_str(), complaint.c_str());
    }
    tokens.resize(std::min(count, opt.max_tokens));
    if (tokens.size() < MIN_TOKENS) {
        fail("%s: text too short: %zu tokens, at least %zu are needed", opt.input.c_str(), tokens.size(), MIN_TOKENS);
    }
    return tokens;
}

json_object describe(const options & opt, const llama_model * model, const llama_context * context,
                     const tap & listener) {
    std::string layers, top_k;
    for (const auto & entry : listener.layers) {
        layers += (layers.empty() ? "" : ",") + std::to_string(entry.first);
        top_k += (top_k.empty() ? "" : ",") + std::to_string(entry.second.k);
    }
    const llama_token bos = bos_of(model);
    json_object about;
    about.string("model", opt.model).string("text", opt.input);
    about.string("architecture", metadata(model, "general.architecture")).string("llama_cpp", llama_version());
    about.number("num_experts", listener.n_experts).raw("layers", "[" + layers + "]").raw("top_k", "[" + top_k + "]");
    about.raw("bos", bos == LLAMA_TOKEN_NULL ? "null" : std::to_string(bos));
    about.number("n_ctx", opt.ctx).number("n_ubatch", llama_n_ubatch(context)).number("n_threads", opt.threads);
    return about.number("n_gpu_layers", opt.gpu_layers).raw("decode", opt.decode ? "true" : "false");
}

// One call of llama_decode, with the logits of every token asked for: otherwise the last layer skips the others.
// At most one ubatch long, so that each layer routes all of it at once. False if interrupted: not to be trusted.
bool decode(llama_context * context, llama_batch & batch, const llama_token * tokens, int count, int position,
            tap & listener) {
    batch.n_tokens = count;
    for (int i = 0; i < count; i++) {
        batch.token[i]     = tokens[i];
        batch.pos[i]       = position + i;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i]    = 1;
    }
    listener.begin(count);
    const int status = llama_decode(context, batch);
    if (interrupted) {
        return false;
    }
    if (status != 0) {
        fail("llama.cpp cannot decode token %d of a window (code %d: %s)", position, status, complaint.c_str());
    }
    const std::string failure = listener.finish();
    if (!failure.empty()) {
        fail("%s: this model on llama.cpp %s is not supported", failure.c_str(), llama_version());
    }
    return true;
}

void trace(const options & opt, const llama_model * model, llama_context * context, tap & listener, trace_file & out,
           const std::vector<token_list> & windows) {
    const int step = opt.decode ? 1 : (int) llama_n_ubatch(context);
    llama_batch batch = llama_batch_init(step, 0, 1); // lives as long as the process
    auto told = std::chrono::steady_clock::now();
    for (size_t w = 0; w < windows.size(); w++) {
        const token_list & window = windows[w];
        llama_memory_clear(llama_get_memory(context), true);
        for (int at = 0; at < (int) window.size(); at += step) {
            const int count = std::min(step, (int) window.size() - at);
            if (!decode(context, batch, window.data() + at, count, at, listener)) {
                return;
            }
            if (!out.begun) {
                out.header(describe(opt, model, context, listener));
            }
            out.record((uint32_t) w, window.data() + at, count, listener);
            if (std::chrono::steady_clock::now() - told > std::chrono::seconds(5)) {
                told = std::chrono::steady_clock::now();
                fprintf(stderr, "llama-moe-trace: %u tokens, window %zu of %zu\n", out.total, w + 1, windows.size());
            }
        }
    }
    out.end();
}

// The first one lets the run end in order, the second one ends it at once.
void on_signal(int number) {
    interrupted = 1;
    std::signal(number, SIG_DFL);
}

int run(int argc, char ** argv) {
    const options opt = parse(argc, argv);
    const std::string content = read_text(opt.input);
    std::signal(SIGINT, on_signal);
    std::signal(SIGTERM, on_signal);
    refuse_unwritable(opt.output); // an unwritable output must not cost minutes

    llama_log_set(keep_complaint, nullptr);
    if (ggml_backend_dev_count() == 0) {
        ggml_backend_load_all(); // a build whose backends are separate files
    }
    llama_backend_init();
    const model_ptr model = load(opt);
    tap listener;
    listener.n_experts = count_experts(opt, model.get());
    const std::vector<token_list> windows = cut(tokenize(opt, model.get(), content), opt.ctx, bos_of(model.get()));
    const context_ptr context = open_context(opt, model.get(), listener);
    trace_file out(opt.output);
    trace(opt, model.get(), context.get(), listener, out, windows);
    if (!out.begun) {
        fail("interrupted, nothing written");
    }
    fprintf(stderr, "llama-moe-trace: %s: %s%u tokens, %zu layers, %d experts\n", opt.output.c_str(),
            interrupted ? "interrupted; kept " : "", out.total, listener.layers.size(), listener.n_experts);
    return interrupted ? 130 : 0;
}

} // namespace

int main(int argc, char ** argv) {
    try {
        return run(argc, argv);
    } catch (const std::exception & error) {
        fprintf(stderr, "llama-moe-trace: %s\n", error.what());
        return interrupted ? 130 : 2;
    }
}
