-- Slurm's burst_buffer/lua (22.05 and later) over Forebay: every function calls `forebay bb hook NAME`, which has all
-- logic. docs/slurm.md says how to install it.
--
-- The command's first line is the return code, the rest the message. slurmctld calls job_process, pools and paths
-- itself, so they have a time limit.

local FOREBAY = os.getenv("FOREBAY_COMMAND") or "forebay"
local SECONDS = 10

local function quoted(word)
	return "'" .. string.gsub(tostring(word), "'", "'\\''") .. "'"
end

local function call(limit, name, ...)
	local command = quoted(FOREBAY) .. " bb hook " .. name
	if limit then
		command = "timeout -k 1 " .. limit .. " " .. command
	end
	for i = 1, select("#", ...) do
		command = command .. " " .. quoted((select(i, ...)))
	end
	local pipe = io.popen(command .. " 2>&1 </dev/null", "r")
	if not pipe then
		return slurm.ERROR, "cannot start " .. FOREBAY
	end
	local text = pipe:read("*a") or ""
	pipe:close()
	local code, message = string.match(text, "^(%d)\n(.*)$")
	if not code then
		return slurm.ERROR, "forebay did not answer: " .. text
	end
	if code == "0" then
		return slurm.SUCCESS, message
	end
	slurm.log_error("burst_buffer.lua: %s: %s", name, message)
	return slurm.ERROR, message
end

function slurm_bb_job_process(job_script)
	return call(SECONDS, "job_process", job_script)
end

function slurm_bb_pools()
	return call(SECONDS, "pools")
end

function slurm_bb_setup(job_id, uid, gid, pool, bb_size, job_script)
	return call(nil, "setup", job_id, uid, gid, pool, bb_size, job_script)
end

function slurm_bb_data_in(job_id, job_script)
	return call(nil, "data_in", job_id, job_script)
end

function slurm_bb_test_data_in(job_id, job_script)
	return call(nil, "test_data_in", job_id, job_script)
end

function slurm_bb_real_size(job_id)
	return call(nil, "real_size", job_id)
end

function slurm_bb_paths(job_id, job_script, path_file)
	return call(SECONDS, "paths", job_id, job_script, path_file)
end

function slurm_bb_pre_run(job_id, job_script)
	return call(nil, "pre_run", job_id, job_script)
end

function slurm_bb_post_run(job_id, job_script)
	return call(nil, "post_run", job_id, job_script)
end

function slurm_bb_data_out(job_id, job_script)
	return call(nil, "data_out", job_id, job_script)
end

function slurm_bb_test_data_out(job_id, job_script)
	return call(nil, "test_data_out", job_id, job_script)
end

function slurm_bb_job_teardown(job_id, job_script, hurry)
	return call(nil, "job_teardown", job_id, job_script, hurry)
end

function slurm_bb_get_status(...)
	return call(nil, "get_status", ...)
end
