-- hpctrain for Lmod; `main` beside it is the same for environment-modules.
--
--   module use /path/to/hpctrain/modules
--   module load hpctrain
--   $MPIRUN -n 4 hpctrain train CONFIG.toml
--
-- The checkout that this file lies in is used, with the environment that `source jobs/env.sh` once made there.
-- With HPCTRAIN_SITE the modules and settings of jobs/sites/$HPCTRAIN_SITE.env come along.

local root = myFileName():match("^(.*)/modules/hpctrain/[^/]*$")
local venv = root .. "/.venv"

local function content(path)
    local file = io.open(path)
    if not file then return nil end
    local text = file:read("*a")
    file:close()
    return text
end

local function exists(path)
    local file = io.open(path)
    if file then file:close() end
    return file ~= nil
end

local version = content(root .. "/hpctrain/__init__.py"):match('__version__ = "([^"]+)"')
local site = os.getenv("HPCTRAIN_SITE") or ""
if site == "" then site = "generic" end
-- what was loaded is unloaded, whatever the site is called by then
if mode() == "unload" then site = os.getenv("HPCTRAIN_SITE_LOADED") or site end
local settings = content(root .. "/jobs/sites/" .. site .. ".env")

help([[
hpctrain ]] .. version .. [[: train neural networks with MPI on a grid of data x pipeline x tensor ranks.

    $MPIRUN -n 4 hpctrain train CONFIG.toml     with the options that this machine's MPI needs
    hpctrain submit jobs/train.sbatch           under Slurm
    hpctrain --help

Set HPCTRAIN_SITE before loading to one of the names in jobs/sites.
]])
whatis("Name: hpctrain")
whatis("Version: " .. version)
whatis("Category: machine learning, MPI")
whatis("Description: train neural networks with MPI on a data x pipeline x tensor grid, equal to one rank")

family("hpctrain") -- a site's builds for other devices or compilers exclude each other

if not settings then
    LmodError("HPCTRAIN_SITE=" .. site .. ", but there is no " .. root .. "/jobs/sites/" .. site .. ".env")
end
if not exists(venv .. "/bin/hpctrain") then
    LmodError("hpctrain is not installed yet in " .. root .. "; run once:  source " .. root .. "/jobs/env.sh")
end

for name, value in settings:gmatch('export ([%w_]+)="([^"]*)"') do
    if name == "HPCTRAIN_MODULES" then
        for needed in value:gmatch("%S+") do depends_on(needed) end
    end
    pushenv(name, value)
end

-- libraries as jobs/env.sh gives them: those that Cray's modules name to link, and MPICH's under the name of mpi4py's
local cray = os.getenv("CRAY_LD_LIBRARY_PATH")
if cray then prepend_path("LD_LIBRARY_PATH", cray) end
if exists(venv .. "/lib/mpich/libmpi.so.12") then prepend_path("LD_LIBRARY_PATH", venv .. "/lib/mpich") end
pushenv("HPCTRAIN_SITE_LOADED", site)
prepend_path("PATH", venv .. "/bin")
pushenv("VIRTUAL_ENV", venv)
pushenv("PYTHONNOUSERSITE", "1") -- none of the user's own packages
pushenv("HPCTRAIN_ROOT", root)
pushenv("MPIRUN", root .. "/jobs/mpirun.sh")
-- the environment holds an MPI of its own where env.sh found none at the site
pushenv("HPCTRAIN_MPI_FOUND", exists(venv .. "/bin/mpirun") and "wheel" or "site")
