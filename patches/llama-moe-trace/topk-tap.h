// The router's choices, copied out of a graph while llama.cpp computes it.

#pragma once

#include "ggml.h"
#include "llama.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

// The layer of a `ffn_moe_topk-<layer>` node, whose name may be decorated as `<backend>#<name>#<copy>`; else -1.
inline int topk_layer(const char * name) {
    static const std::string prefix = "ffn_moe_topk-";
    const char * const mark = std::strchr(name, '#');
    const char * const start = mark ? mark + 1 : name;
    if (std::strncmp(start, prefix.c_str(), prefix.size()) != 0) {
        return -1;
    }
    char * end = nullptr;
    const long layer = std::strtol(start + prefix.size(), &end, 10);
    return end != start + prefix.size() && (*end == '\0' || *end == '#') ? (int) layer : -1;
}

struct layer_rows {
    int k    = 0;
    int rows = 0;
    std::vector<int16_t> experts; // [rows, k]
};

// Collects one decode call at a time. Deaf outside of it, so that no warm-up is taken for tokens.
struct tap {
    int n_experts = 0;
    int expected  = 0; // rows of the running decode call; 0 when none runs
    size_t known  = 0; // layers that the calls before it told about
    std::map<int, layer_rows> layers;
    std::vector<uint8_t> bytes;
    std::string failure; // said after the decode call: no exception may cross llama.cpp

    void begin(int n_tokens) {
        expected = n_tokens;
        known = layers.size();
        for (auto & entry : layers) {
            entry.second.rows = 0;
            entry.second.experts.clear();
        }
    }

    void take(int id, const ggml_tensor * t) {
        layer_rows & layer = layers[id];
        const int k = (int) t->ne[0], rows = (int) t->ne[1];
        if (layer.rows == expected) {
            return; // some architectures build the same choice into the graph twice
        }
        if (t->type != GGML_TYPE_I32 || t->nb[0] != sizeof(int32_t) || t->ne[2] != 1 || t->ne[3] != 1 ||
            (layer.k && layer.k != k) || layer.rows + rows > expected) {
            failure = std::string(t->name) + " is not one row of expert ids per token";
            return;
        }
        layer.k = k;
        layer.rows += rows;
        // A view of the argsort: a row starts every nb[1] bytes, and ggml_nbytes spans from the first id to the last.
        bytes.resize(ggml_nbytes(t));
        ggml_backend_tensor_get(t, bytes.data(), 0, bytes.size());
        for (int row = 0; row < rows; row++) {
            take_row(layer, reinterpret_cast<const int32_t *>(bytes.data() + row * t->nb[1]));
        }
    }

    void take_row(layer_rows & layer, const int32_t * ids) {
        for (int rank = 0; rank < layer.k; rank++) {
            if (ids[rank] < 0 || ids[rank] >= n_experts || std::count(ids, ids + rank, ids[rank])) {
                failure = "a token's experts are repeated or out of range";
            }
            layer.experts.push_back((int16_t) ids[rank]);
        }
    }

    // What is wrong with the decode call that ended, or nothing: every layer must have told about every token.
    std::string finish() {
        for (const auto & entry : layers) {
            if (failure.empty() && entry.second.rows != expected) {
                failure = "layer " + std::to_string(entry.first) + " routed " + std::to_string(entry.second.rows) +
                          " of " + std::to_string(expected) + " tokens";
            }
        }
        if (failure.empty() && (layers.empty() || (known && known != layers.size()))) {
            failure = "layers with experts: first " + std::to_string(known) + ", then " + std::to_string(layers.size());
        }
        expected = 0;
        return failure;
    }
};
